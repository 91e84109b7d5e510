from .client_privacy import ClientPrivacyFactory as ClientPrivacyFactory
from .client_privacy import ClientPrivacyState as ClientPrivacyState
from .noisy_mean import NoisyMeanFactory as NoisyMeanFactory
