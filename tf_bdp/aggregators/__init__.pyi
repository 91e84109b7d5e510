from .client_privacy import ClientPrivacyFactory as ClientPrivacyFactory
from .cost_reports import ClientCosts as ClientCosts
from .cost_reports import ExampleCosts as ExampleCosts
from .distance_samples import DistanceSample as DistanceSample
from .private_mean import PrivateMeanFactory as PrivateMeanFactory
from .secure_sums import SecureSummation as SecureSummation
