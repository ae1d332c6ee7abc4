"""Running a model without a server: `LLM` from Python, and `python -m jaxserve.offline` on files of prompts.

Under the roof: it builds an engine through `launch`, and turns bodies into requests with the server's schema.
"""

from jaxserve.offline.generation import Completion
from jaxserve.offline.llm import LLM

__all__ = ["LLM", "Completion"]
