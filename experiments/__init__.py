"""Experiments with tf_bdp."""
