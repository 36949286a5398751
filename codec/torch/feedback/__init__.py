"""Error feedback: the encoding errors (residuals) of one collective are added to the values of the next.

This package changes residuals only after all ranks have succeeded. It never sends messages.
"""
