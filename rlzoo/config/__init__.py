"""The configuration of a run, and how it is composed."""

import logging

from rlzoo.config.redaction import RedactingFilter

logging.getLogger("rlzoo").addFilter(RedactingFilter())
