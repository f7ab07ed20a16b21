from __future__ import annotations

import pytest

from tests.deploy.packages import Built, build_packages


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Wheel and sdist, built once."""
    return build_packages(tmp_path_factory.mktemp("packages"))
