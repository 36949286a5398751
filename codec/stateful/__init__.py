"""State that persists between steps: error-feedback residuals, shared codebooks, and activations of samples."""

from codec.stateful.activation.delta import ActivationDelta
from codec.stateful.codebook_refresher import CodebookRefresher
from codec.stateful.feedback import ErrorFeedback

__all__ = ["ActivationDelta", "CodebookRefresher", "ErrorFeedback"]
