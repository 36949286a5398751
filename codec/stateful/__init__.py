"""State that is kept from one step to the next: residuals of error feedback, and codebooks that all ranks share."""

from codec.stateful.codebook_refresher import CodebookRefresher
from codec.stateful.feedback import ErrorFeedback

__all__ = ["CodebookRefresher", "ErrorFeedback"]
