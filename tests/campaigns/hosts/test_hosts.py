"""Two hosts over a real NFS. It needs root, the packages of ``packages.PACKAGES`` and about five minutes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.hosts.__main__ import run
from tests.campaigns.hosts.cluster import MOUNTS, Mount
from tests.campaigns.hosts.packages import UnavailableError, unpacked


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hosts")
    try:
        unpacked(folder)
    except UnavailableError as error:
        pytest.skip(f"two hosts cannot be built here: {error}")
    return folder


@pytest.mark.campaign
@pytest.mark.parametrize("mount", MOUNTS, ids=lambda mount: mount.name)
def test_two_hosts_get_what_is_promised(packages: Path, mount: Mount) -> None:
    console = packages / f"{mount.name}.log"
    results = run(mount, packages, [], console)
    assert results, f"the machine did not run: {console.read_bytes()[-2000:]!r}"
    assert not {str(line["trial"]): line["found"] for line in results if not line["good"]}
