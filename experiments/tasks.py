"""What can be learnt: data sets, each with the model for it.

A task is registered under the name of its data set; `--dataset` offers all that
there are.
"""

import dataclasses
import functools
from typing import Any, Callable, NamedTuple, Optional

from tf_bdp import options

TASKS: 'dict[str, _Make]' = {}
# Settings that go well with a data set, a model and a level, for flags that are
# not given. The first model that has some for a data set and a level is the one
# that is trained by default.
RECIPES: dict[tuple[str, str, str], dict[str, Any]] = {
  ('digits', 'linear', 'client'): {
    'mechanism': 'sum',
    'participation_probability': 1.0,
    'noise_multiplier': 6.5,
    'clip_norm': 0.25,
    'rounds': 40,
    'learning_rate': 15.0,
    'momentum': 0.0,
    'average_iterates': 0.9,
  },
  ('mnist', 'linear', 'client'): {
    'mechanism': 'sum',
    'participation_probability': 1.0,
    'noise_multiplier': 7.5,
    'clip_norm': 0.02,
    'rounds': 30,
    'learning_rate': 60.0,
    'momentum': 0.5,
    'average_iterates': 0.9,
    'client_loss': 'calibrated',
  },
}


@dataclasses.dataclass(frozen=True)
class Data:
  """Which data, and how clients hold them."""

  dataset: str = options.option('digits', 'What to learn.', choices=TASKS)
  data_dir: Optional[str] = options.option(
    None,
    "Where TensorFlow Datasets has its data, or puts them; for aptos Kaggle's "
    'folder with train.csv and train_images.',
  )
  clients: int = options.option(100, 'Number of clients.')
  examples_per_client: int = options.option(
    0,
    'Examples of each client, used repeatedly if there are too few; 0 for an '
    'equal share.',
  )
  partition: str = options.option(
    'iid',
    'How examples are spread over clients: at random, in two shards of one '
    'class each, or with class shares of a Dirichlet distribution.',
    choices=('iid', 'shards', 'dirichlet'),
  )
  dirichlet_beta: float = options.option(
    0.5, 'With --partition=dirichlet: small is uneven.'
  )
  evaluate_on: str = options.option(
    'test',
    'What accuracy is measured on. validation sets a part of the training data '
    'aside, to choose hyper-parameters by.',
    choices=('test', 'validation'),
  )
  validation_share: float = options.option(
    0.1, 'How much of the training data --evaluate_on=validation sets aside.'
  )
  augmentation_versions: int = options.option(
    4, 'With --dataset=aptos: versions of each training image.'
  )
  cache_dir: str = options.option(
    '~/.cache/tf_bdp/features',
    'Where the features of images are kept, once they are computed.',
  )

  def __post_init__(self) -> None:
    options.check_choices(self)


@dataclasses.dataclass(frozen=True)
class Model:
  """The model that is trained."""

  model: str = options.option(
    'cnn',
    'For digits and mnist. cnn: the convolutional network of the paper. '
    'linear: one linear layer on fixed, public --features, which has far fewer '
    'weights to be noised, and is the default where it has settings of its own '
    '(--level=client). Those hold for flags that are not given.',
    choices=('cnn', 'linear'),
  )
  features: str = options.option(
    'orientations',
    'What --model=linear sees of an image: histograms of gradient orientations '
    'on a grid, or its pixels. Both are computed image by image and cost no '
    'privacy.',
    choices=('orientations', 'pixels'),
  )
  feature_grid: int = options.option(
    4, 'Cells from side to side, with --features=orientations.'
  )
  feature_orientations: int = options.option(
    8, 'Orientations in each cell, with --features=orientations.'
  )
  activation: str = options.option(
    'relu', 'Activation between layers of the CNN; tanh is bounded.'
  )
  filters: int = options.option(
    16,
    'Filters of the first convolution of the CNN; the layers after it have '
    'twice as many.',
  )
  kernel_size: int = options.option(
    8, 'Kernel size of the first convolution of the CNN.'
  )
  normalised: bool = options.option(
    False,
    'Whether the CNN normalises each image and its last features, averages '
    'where it pools, and starts with logits of 0; for much noise and few '
    'rounds.',
  )
  resnet50_weights: str = options.option(
    'imagenet',
    'With --dataset=aptos: a file with the weights of ResNet-50 without its '
    'top, or imagenet to download them.',
  )
  fine_tune: str = options.option(
    'none',
    'With --dataset=aptos: what is trained apart from the last layer.',
    choices=('none', 'backbone', 'backbone_with_batch_norm'),
  )

  def __post_init__(self) -> None:
    options.check_choices(self)


class Task(NamedTuple):
  """Data, and what makes a model for them.

  Attributes:
    dataset: A `datasets.Dataset`.
    model_fn: Makes a Keras model whose outputs are logits.
    feature_map: The Keras model that made the data's features from images, if
      any; a saved model has it in front.
  """

  dataset: Any
  model_fn: Callable[[], Any]
  feature_map: Optional[Any] = None


_Make = Callable[[Data, Model, int], Task]


def recipe(
  dataset: str, level: str, model: Optional[str] = None
) -> dict[str, Any]:
  """Returns settings for what is not given, among them the model."""
  for (its_dataset, its_model, its_level), settings in RECIPES.items():
    fits = (its_dataset, its_level) == (dataset, level)
    if fits and model in (None, its_model):
      return {'model': its_model, **settings}
  return {}


def register(*names: str) -> Callable[[_Make], _Make]:
  """Enters a function of options and a seed into `TASKS`."""

  def enter(make: _Make) -> _Make:
    TASKS.update(dict.fromkeys(names, make))
    return make

  return enter


@register('digits', 'mnist')
def _digits(data: Data, model: Model, seed: int) -> Task:
  """Handwritten digits, and a CNN or a linear layer on public features."""
  from experiments import datasets, feature_maps, models

  images = datasets.load(data.dataset, data.data_dir)
  if model.model == 'linear':
    options_of = {}
    if model.features == 'orientations':
      options_of['grid'] = model.feature_grid
      options_of['orientations'] = model.feature_orientations
    shape = images.train_features.shape[1:]
    feature_map = feature_maps.build(model.features, shape, **options_of)
    dataset = feature_maps.apply(feature_map, images, data.cache_dir)
    size = dataset.train_features.shape[1]
    return Task(dataset, functools.partial(models.linear, size), feature_map)
  return Task(
    images,
    functools.partial(
      models.mnist_cnn,
      seed,
      model.activation,
      model.filters,
      model.kernel_size,
      model.normalised,
    ),
  )


@register('aptos')
def _aptos(data: Data, model: Model, seed: int) -> Task:
  """Retina images, and a ResNet-50 or its last layer."""
  from experiments import datasets, features, models

  if model.fine_tune == 'none':
    return Task(
      features.aptos_features(
        data.data_dir,
        model.resnet50_weights,
        data.augmentation_versions,
        cache_dir=data.cache_dir,
      ),
      functools.partial(models.aptos_head, seed),
    )
  return Task(
    datasets.load(data.dataset, data.data_dir),
    functools.partial(
      models.resnet50, model.resnet50_weights, model.fine_tune, seed
    ),
  )
