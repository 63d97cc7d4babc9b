"""The page of `locas app`.

`sessions.py` has the visitors and the model that they share, `page.py` is the layout.

Each browser has a `library.Library` of its own, found by a key in its storage, in a temporary
folder; or all share one folder, which stays. Texts, questions and readings are never shared. There
is no password.
"""

import os

# Read when `page.py` imports gradio.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
