from .evaluation import Evaluator as Evaluator
from .loop import train as train
from .plan import Accounting as Accounting
from .plan import Plan as Plan
from .plan import Privacy as Privacy
from .plan import Schedule as Schedule
from .plan import Seeds as Seeds
from .progress import Progress as Progress
