"""Settings of the site: ``make docs``."""

import logging
import os
import sys
from pathlib import Path

from jupyter_client.manager import KernelManager

from attention_priors import __version__

sys.path.insert(0, str(Path(__file__).with_name("extensions")))

# Kernels warn about connections without encryption, and a quiet build prints nothing.
KernelManager.transport_encryption.default_value = "auto"
logging.getLogger("traitlets").setLevel(logging.WARNING)
# Tutorials show no progress bars, and no warning about a property of transformers that peft reads.
os.environ |= {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore:IProgress,ignore:`is_gradient_checkpointing`"}
# Tutorials run the commands of this environment.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

project = "attention-priors"
release = __version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "mathml",
    "repository",
    "generated",
]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_in_temp = True  # files of tutorials stay out of docs/
nb_execution_timeout = 1200  # seconds a cell, on a busy machine
nb_merge_streams = True
nb_output_stderr = "warn"  # and the strict build fails

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
