"""What is remembered from one step to the next: errors to be fed back, and codebooks that ranks agree on."""

from codec.stateful.feedback import ErrorFeedback
from codec.stateful.refresher import CodebookRefresher

__all__ = ["CodebookRefresher", "ErrorFeedback"]
