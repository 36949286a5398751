"""Error feedback: residuals of frames, kept from one collective to the next.

Modules here change residuals only after all ranks have succeeded. They never send messages.
"""
