"""Tools for people who work on tf_bdp."""
