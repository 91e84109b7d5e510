from .run_report import local_epsilons as local_epsilons
