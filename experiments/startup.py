"""How the scripts start."""

import os
import sys
from typing import Callable

from absl import app, logging


def start(main: Callable[[list[str]], None]) -> None:
  """Parses the flags, imports TensorFlow and runs a script."""
  # --help and mistakes in flags are answered before the slow imports, which
  # must come before `app.run`: Keras 2.14 breaks if it is first imported there.
  app.define_help_flags()
  app.parse_flags_with_usage(sys.argv)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  import tensorflow as tf

  tf.get_logger().setLevel('ERROR')
  logging.set_verbosity(logging.ERROR)

  app.run(main)
