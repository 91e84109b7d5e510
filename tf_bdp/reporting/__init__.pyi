from . import page as page
from . import run_report as run_report
from .run_report import local_epsilons as local_epsilons
