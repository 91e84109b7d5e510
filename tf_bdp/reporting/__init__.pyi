from . import page as page
from . import plots as plots
