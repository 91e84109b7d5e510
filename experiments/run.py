"""One training run, from its settings to its outcome."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments import tasks
from tf_bdp import options, validation
from tf_bdp.learning import algorithm as algorithm_lib
from tf_bdp.training import plan as plan_lib
from tf_bdp.training import progress as progress_lib

if TYPE_CHECKING:
  from tf_bdp.learning import federated_data

# What may differ between a run and its continuation.
PLACES = ('data_dir', 'resnet50_weights', 'cache_dir')


@dataclasses.dataclass(frozen=True)
class Settings:
  """All that determines a run, in groups of options."""

  data: tasks.Data
  model: tasks.Model
  algorithm: algorithm_lib.Algorithm
  privacy: plan_lib.Privacy
  accounting: plan_lib.Accounting
  schedule: plan_lib.Schedule
  seeds: plan_lib.Seeds

  @classmethod
  def of(cls, **values: Any) -> 'Settings':
    """Makes settings from values by name; others have their defaults."""
    kinds = [field.type for field in dataclasses.fields(cls)]
    known = options.to_flat(*(kind() for kind in kinds))  # type: ignore[operator]
    for name in values:
      validation.check_choice('setting', name, tuple(known))
    return cls(*(options.from_flat(kind, values) for kind in kinds))  # type: ignore[type-var,arg-type]

  def __post_init__(self) -> None:
    validation.check_positive_integer('clients', self.data.clients)

  def plan(self, data: 'federated_data.FederatedData') -> plan_lib.Plan:
    """Returns the plan of the run on some data."""
    return plan_lib.Plan.of(
      data,
      self.privacy,
      self.algorithm,
      accounting=self.accounting,
      schedule=self.schedule,
      seeds=self.seeds,
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the settings by name."""
    groups = [getattr(self, field.name) for field in dataclasses.fields(self)]
    return options.to_flat(*groups)

  def determining(self) -> dict[str, Any]:
    """Returns the settings by name, but for those that are mere places."""
    return {k: v for k, v in self.to_dict().items() if k not in PLACES}


class Outcome(NamedTuple):
  """What came out of a run."""

  plan: plan_lib.Plan
  progress: progress_lib.Progress
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
  from experiments import datasets, partition
  from tf_bdp.engines import in_process
  from tf_bdp.training import evaluation, loop

  fed_sgd = settings.algorithm.name == 'fed_sgd'
  if settings.schedule.engine == 'inprocess' and fed_sgd:
    in_process.compute_clients_in_parallel()
  if overwrite and not resume:
    (directory / progress_lib.CHECKPOINT_FILE).unlink(missing_ok=True)
  how, seed = settings.data, settings.seeds.seed
  task = tasks.TASKS[how.dataset](how, settings.model, seed)
  dataset, model_fn, feature_map = task
  if how.evaluate_on == 'validation':
    dataset = datasets.hold_out_validation(dataset, how.validation_share, seed)
  data = partition.split(
    dataset,
    how.partition,
    how.clients,
    how.examples_per_client,
    seed,
    dirichlet_beta=how.dirichlet_beta,
  )
  plan = settings.plan(data)
  engine = plan.engine(model_fn, data)
  evaluator = evaluation.Evaluator(
    model_fn(), dataset.test_features, dataset.test_labels, feature_map
  )
  progress = loop.train(
    engine,
    plan,
    evaluator.evaluate,
    directory,
    settings=settings.determining(),
    resume=resume,
  )
  weights = progress.weights(engine)
  evaluator.save(weights, directory / 'model')
  return Outcome(plan, progress, sum(w.size for w in weights))
