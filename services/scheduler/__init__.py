"""The scheduler service: it decides; nothing here touches a tensor."""

from shared.compiled import use_compiled

use_compiled()
