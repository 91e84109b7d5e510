"""How the scripts start."""

import os
import sys
from typing import Callable

from absl import app, logging

from experiments import flags
from tf_bdp.analysis import command_line


def start(main: Callable[[list[str]], None]) -> None:
  """Parses the flags, imports TensorFlow and runs a script."""
  # --help and mistakes in flags are answered before the slow imports, which
  # must come before `app.run`: Keras 2.14 breaks if it is first imported there.
  flags.show_help_if_asked(sys.argv)
  arguments = command_line.parse_flags(sys.argv)
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  # TensorFlow has it off on processors without AVX-512, where convolutions then
  # take three times as long.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '1')
  import tensorflow as tf

  tf.get_logger().setLevel('ERROR')
  logging.set_verbosity(logging.ERROR)

  # Parsed a second time, flags with several values would have them twice.
  app.run(main, flags_parser=lambda _: arguments)
