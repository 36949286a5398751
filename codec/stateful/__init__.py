"""What is remembered from one step to the next: errors to be fed back, and codebooks that ranks agree on."""

from codec.stateful.codebook_refresher import CodebookRefresher
from codec.stateful.feedback import ErrorFeedback

__all__ = ["CodebookRefresher", "ErrorFeedback"]
