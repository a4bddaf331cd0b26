"""How `make docs` builds the site: every Markdown page that docs/ and the READMEs beside it hold, with the whole
repository as its source.

The source folder is the repository's root, not docs/, so that a link means the same here and on a code host:
`../recipes/README.md` is a page of the site, with its headings checked, and `../recipes/demo.yaml` a file that must
exist and comes along.
"""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from docs import make_reference

make_reference.main()  # the pages of the recipe's keys and of the commands

project = "cpt"
author = "the cpt authors"
copyright = "the cpt authors, Apache-2.0"
release = metadata.version("continued-pretraining")

extensions = ["myst_nb", "sphinx_external_toc"]
root_doc = "docs/index"
external_toc_path = "docs/_toc.yml"
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
include_patterns = ["docs/**", "*.md"]
include_patterns += [
    f"{folder}/README.md"
    for folder in ("recipes", "launch", "deepspeed_configs", "benchmarks", "tests/docs")
]
exclude_patterns = [".*", "build", "**/.ipynb_checkpoints"]

nitpicky = True  # with `-W`: what cannot be resolved fails the build
myst_heading_anchors = 4  # `page.md#a-heading` is checked, with the names that code hosts give
highlight_language = "none"
nb_execution_mode = (
    "off"  # tests/docs/test_site.py runs them; here they are shown as they were committed
)

linkcheck_anchors = False  # code hosts make theirs with JavaScript
linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_ignore = [r"http://(localhost|127\.0\.0\.1).*"]

html_theme = "furo"
html_title = f"cpt {release}"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["site"]  # an index.html that leads to docs/index.html
html_theme_options = {"navigation_with_keys": True}
