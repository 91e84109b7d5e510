"""One training run, from its settings to its outcome."""

import dataclasses
import functools
import pathlib
from typing import Any, Callable, NamedTuple, Optional

from tf_bdp import validation
from tf_bdp.engines import base as engine_lib
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.learning import federated_data
from tf_bdp.mechanisms import client as mechanism_lib
from tf_bdp.mechanisms import instance as instance_mechanism
from tf_bdp.training import evaluation
from tf_bdp.training import loop as training

ENGINES = ('inprocess', 'tff')
LEVELS = ('client', *instance_mechanism.LEVELS)
EVALUATE_ON = ('test', 'validation')
# What may differ between a run and its continuation.
_PLACES = ('data_dir', 'resnet50_weights', 'cache_dir')


@dataclasses.dataclass(frozen=True)
class Settings:
  """All that determines a run; `experiments.train` has a flag for each."""

  dataset: str = 'digits'
  data_dir: Optional[str] = None
  partition: str = 'iid'
  dirichlet_beta: float = 0.5
  clients: int = 100
  examples_per_client: int = 0
  evaluate_on: str = 'test'
  validation_share: float = 0.1
  activation: str = 'relu'
  filters: int = 16
  kernel_size: int = 8
  normalised: bool = False
  resnet50_weights: str = 'imagenet'
  fine_tune: str = 'none'
  augmentation_versions: int = 4
  cache_dir: str = '~/.cache/tf_bdp/features'

  engine: str = 'inprocess'
  algorithm: str = 'fed_sgd'
  rounds: int = 100
  learning_rate: float = 0.02
  learning_rate_decay: float = 1.0
  momentum: float = 0.9
  average_iterates: float = 0.0
  client_learning_rate: float = 0.1
  client_epochs: int = 1
  client_batch_size: int = 32
  examples_per_round: int = 0
  client_loss: str = 'plain'
  participation_probability: float = 0.5
  sampling: str = 'poisson'

  level: str = 'client'
  mechanism: str = 'mean'
  noise_multiplier: Optional[float] = None
  server_noise_multiplier: float = 0.0
  clip_norm: float = 1.0
  clip_quantile: Optional[float] = None
  clipping: str = 'batch'
  example_accounting: Optional[str] = None
  joint_reference: str = 'zero'
  secure_aggregation: bool = False

  delta: float = 1e-3
  example_delta: Optional[float] = None
  panel_size: Optional[int] = None
  panel_examples: int = 0
  estimator: Optional[str] = None
  bdp_epsilon_budget: Optional[float] = None
  example_bdp_epsilon_budget: Optional[float] = None
  dp_epsilon_budget: Optional[float] = None
  evaluate_every: int = 10
  checkpoint_every: int = 10
  seed: int = 0
  noise_seed: Optional[int] = None

  def __post_init__(self) -> None:
    validation.check_choice('engine', self.engine, ENGINES)
    validation.check_choice('level', self.level, LEVELS)
    validation.check_choice('evaluate_on', self.evaluate_on, EVALUATE_ON)
    validation.check_positive_integer('clients', self.clients)
    if self.seed < 0:
      raise ValueError(f'seed must be 0 or more. Found {self.seed}.')
    self._check_level()
    if self.secure_aggregation:
      self._check_secure()

  def _check_level(self) -> None:
    """Raises ValueError for settings that have no effect at the level."""
    idle = ('mechanism', 'clip_quantile')
    if self.level == 'client':
      idle = (
        *('server_noise_multiplier', 'clipping', 'example_accounting'),
        *('joint_reference', 'panel_examples'),
      )
    elif self.level != 'joint':
      idle += ('joint_reference',)
    if len(self.units) == 1:
      idle += ('example_delta', 'example_bdp_epsilon_budget')
    for field in dataclasses.fields(self):
      if field.name in idle and getattr(self, field.name) != field.default:
        raise ValueError(
          f'--{field.name} has no effect with --level={self.level}. Leave it '
          'out.'
        )

  def _check_secure(self) -> None:
    """Raises ValueError for what secure sums do not allow."""
    if self.engine != 'tff':
      raise ValueError(
        "--secure_aggregation is done by TFF's secure sums. Add --engine=tff."
      )
    if self.panel_size or self.panel_examples:
      raise ValueError(
        'A panel adds up costs over rounds, which clients under secure '
        'aggregation would have to keep; those of TFF keep nothing. Leave out '
        '--panel_size and --panel_examples: composition is by Hoelder.'
      )
    if self.estimator == 'betting':
      raise ValueError(
        'The betting estimator needs the single costs. With '
        '--secure_aggregation use --estimator=bernstein or student_t.'
      )

  @property
  def units(self) -> tuple[str, ...]:
    """What is protected."""
    if self.level == 'client':
      return ('client',)
    if self.level in instance_mechanism.INSTANCE_LEVELS:
      return ('example',)
    return ('client', 'example')

  def training_config(self) -> training.TrainingConfig:
    """Returns how long to train, and what to account for."""
    panel_size, estimator = self.panel_size, self.estimator
    if panel_size is None:
      panel_size = min(self.clients, 100)
      if (self.engine, self.level, self.noise_seed) == ('tff', 'split', None):
        panel_size = 0  # TFF cannot measure a noisy update a second time.
    if self.secure_aggregation:
      panel_size, estimator = 0, estimator or 'bernstein'
    return training.TrainingConfig(
      rounds=self.rounds,
      client_count=self.clients,
      delta=self.delta,
      example_delta=self.example_delta,
      seed=self.seed,
      sampling=self.sampling,
      panel_size=panel_size,
      estimator=estimator or 'betting',
      example_estimator=estimator or 'bernstein',
      bdp_epsilon_budget=self.bdp_epsilon_budget,
      example_bdp_epsilon_budget=self.example_bdp_epsilon_budget,
      dp_epsilon_budget=self.dp_epsilon_budget,
      average_iterates=self.average_iterates,
      evaluate_every=self.evaluate_every,
      checkpoint_every=self.checkpoint_every,
    )

  def training_algorithm(self) -> algorithm_lib.Algorithm:
    """Returns how clients and server learn."""
    return algorithm_lib.Algorithm(
      name=self.algorithm,
      learning_rate=self.learning_rate,
      learning_rate_decay=self.learning_rate_decay,
      momentum=self.momentum,
      client_learning_rate=self.client_learning_rate,
      client_epochs=self.client_epochs,
      client_batch_size=self.client_batch_size,
      examples_per_round=self.examples_per_round,
      client_loss=self.client_loss,
    )

  def privacy_mechanism(
    self, data: federated_data.FederatedData
  ) -> engine_lib.Mechanism:
    """Returns the mechanism of the level."""
    expected = self.participation_probability * data.client_count
    noise = self.noise_multiplier
    if self.level == 'client':
      return mechanism_lib.GaussianMechanism(
        kind=self.mechanism,
        noise_multiplier=2.0 if noise is None else noise,
        clip_norm=self.clip_norm,
        participation_probability=self.participation_probability,
        expected_clients=expected,
        clip_quantile=self.clip_quantile,
      )
    if noise is None:
      noise = 0.3 if self.clipping == 'batch' else 2.0
    holdings = [len(data.indices(c)) for c in range(data.client_count)]
    return instance_mechanism.InstanceMechanism(
      level=self.level,
      noise_multiplier=noise,
      clip_norm=self.clip_norm,
      batch_size=self.client_batch_size,
      participation_probability=self.participation_probability,
      expected_clients=expected,
      total_examples=sum(holdings),
      smallest_holding=min(filter(None, holdings), default=1),
      clipping=self.clipping,
      server_noise_multiplier=self.server_noise_multiplier,
      accounting=self.example_accounting or '',
      local_steps=self.training_algorithm().local_steps(
        max(holdings), self.client_batch_size
      ),
      panel_examples=self.panel_examples,
      reference_is_last_mean=self.joint_reference == 'last_mean',
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the settings by name."""
    return dataclasses.asdict(self)


class Outcome(NamedTuple):
  """What came out of a run."""

  mechanism: engine_lib.Mechanism
  config: training.TrainingConfig
  progress: training.Progress
  model_size: int


def run(
  settings: Settings,
  directory: pathlib.Path,
  resume: bool = False,
  overwrite: bool = False,
) -> Outcome:
  """Trains, and saves the model.

  Args:
    settings: All that determines the run.
    directory: Gets all files of the run.
    resume: Whether to go on from the directory's checkpoint, if there is one.
    overwrite: Whether to discard a run that the directory holds, if it is not
      resumed.
  """
  from experiments import partition

  config, algorithm = settings.training_config(), settings.training_algorithm()
  if settings.engine == 'inprocess' and settings.algorithm == 'fed_sgd':
    from tf_bdp.engines import in_process as inprocess_engine

    inprocess_engine.compute_clients_in_parallel()
  if overwrite and not resume:
    (directory / training.CHECKPOINT_FILE).unlink(missing_ok=True)
  dataset, model_fn = _task(settings)
  data = partition.split(
    dataset,
    settings.partition,
    settings.clients,
    settings.examples_per_client,
    settings.seed,
    dirichlet_beta=settings.dirichlet_beta,
  )
  mechanism = settings.privacy_mechanism(data)
  engine = _engine(settings, model_fn, data, mechanism, algorithm, config)
  evaluator = evaluation.Evaluator(
    model_fn(), dataset.test_features, dataset.test_labels
  )
  determining = settings.to_dict()
  for place in _PLACES:
    del determining[place]
  progress = training.train(
    engine, config, evaluator.evaluate, directory, determining, resume
  )
  weights = progress.weights(engine)
  evaluator.save(weights, directory / 'model')
  return Outcome(mechanism, config, progress, sum(w.size for w in weights))


def _task(settings: Settings) -> tuple[Any, Callable[[], Any]]:
  """Returns the data, and what makes the model."""
  from experiments import datasets, features, models

  if settings.dataset != 'aptos':
    dataset = datasets.load(settings.dataset, settings.data_dir)
    model_fn = functools.partial(
      models.mnist_cnn,
      settings.seed,
      settings.activation,
      settings.filters,
      settings.kernel_size,
      settings.normalised,
    )
  elif settings.fine_tune == 'none':
    dataset = features.aptos_features(
      settings.data_dir,
      settings.resnet50_weights,
      settings.augmentation_versions,
      cache_dir=settings.cache_dir,
    )
    model_fn = functools.partial(models.aptos_head, settings.seed)
  else:
    dataset = datasets.load(settings.dataset, settings.data_dir)
    model_fn = functools.partial(
      models.resnet50,
      settings.resnet50_weights,
      settings.fine_tune,
      settings.seed,
    )
  if settings.evaluate_on == 'validation':
    dataset = datasets.hold_out_validation(
      dataset, settings.validation_share, settings.seed
    )
  return dataset, model_fn


def _engine(
  settings: Settings,
  model_fn: Callable[[], Any],
  data: federated_data.FederatedData,
  mechanism: engine_lib.Mechanism,
  algorithm: algorithm_lib.Algorithm,
  config: training.TrainingConfig,
) -> engine_lib.Engine:
  """Returns the engine for the mechanism."""
  options: dict[str, Any] = {
    'noise_seed': settings.noise_seed,
    'seed': settings.seed,
  }
  if settings.secure_aggregation:
    options['reporting'] = config.reporting(mechanism)
  make: Callable[..., engine_lib.Engine]
  if settings.engine == 'inprocess':
    from tf_bdp.engines import in_process as inprocess_engine

    make = inprocess_engine.InProcessEngine
  elif settings.level == 'client':
    from tf_bdp.engines import tff as tff_engine

    make = tff_engine.TffEngine
  else:
    from tf_bdp.engines import tff_instance as tff_instance_engine

    make = tff_instance_engine.TffInstanceEngine
  return make(model_fn, data, mechanism, algorithm, **options)
