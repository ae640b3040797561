"""A keeper behind TLS on both ports, with and without certificates of clients, and at a unix socket."""

from __future__ import annotations

import asyncio
import signal
import ssl
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

import holdfast
from holdfast import InvalidInput, Unavailable
from holdfast.testing.servers.keeper import KeeperServer
from holdfast.testing.servers.process import MissingServer, find_program
from tests.server.live import run
from tests.servers import missing


class Authority:
    """Signs certificates, all in one folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.name = name
        self.file = folder / f"{name}.pem"
        subject = ["-x509", "-days", "2", "-subj", f"/CN={name}", "-out", str(self.file)]
        self._openssl("req", *_NEW_KEY, *subject, "-keyout", str(folder / f"{name}.key"))

    def signed(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, for this machine."""
        certificate, key, request = (self.folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        self._openssl("req", *_NEW_KEY, "-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request))
        names = self.folder / f"{name}.ext"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        by = ["-CA", str(self.file), "-CAkey", str(self.folder / f"{self.name}.key"), "-CAcreateserial"]
        self._openssl(
            "x509", "-req", "-in", str(request), *by, "-days", "2", "-extfile", str(names), "-out", str(certificate)
        )
        return certificate, key

    def _openssl(self, *arguments: str) -> None:
        subprocess.run([_openssl(), *arguments], check=True, capture_output=True)


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl() -> str:
    try:
        return find_program("openssl")
    except MissingServer as exc:
        missing(exc)


def settings(authority: Authority, **more: str) -> dict[str, object]:
    certificate, key = authority.signed("keeper")
    return {"tls": {"certificate": str(certificate), "key": str(key), **more}}


async def test_tls_on_both_ports_lets_in_only_who_trusts_and_is_trusted(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    with KeeperServer.temporary(**settings(authority)) as keeper:
        url = keeper.url.replace("holdfast://", "holdfasts://")
        async with holdfast.open(f"{url}?ca={authority.file}", token=keeper.admin) as store:
            await store.space("contoso").records.set("k", "x" * 300_000)
            assert len(await store.space("contoso").records.get("k")) == 300_000
        for wrong in (f"{url}?ca={stranger.file}", url):
            with pytest.raises(Unavailable, match="certificate"):
                await holdfast.open(wrong, token=keeper.admin)
        with pytest.raises(Unavailable, match="with TLS is reached by holdfasts://"):
            await holdfast.open(keeper.url, token=keeper.admin)  # not encrypted
        with pytest.raises(InvalidInput, match="cannot be read"):
            await holdfast.open(f"{url}?ca={tmp_path}/none.pem", token=keeper.admin)
        with pytest.raises(InvalidInput, match="no option 'ca'"):
            await holdfast.open(f"{keeper.url}?ca={authority.file}", token=keeper.admin)
        secure = keeper.http.replace("http://", "https://")
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(authority.file))) as web:
            headers = {"Authorization": f"Bearer {keeper.admin}"}
            assert (await web.get(f"{secure}/v1/whoami", headers=headers)).json()["role"] == "admin"
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(stranger.file))) as web:
            with pytest.raises(httpx.ConnectError):
                await web.get(f"{secure}/healthz")
        shown = run("spaces", "--json", HOLDFAST_STORE=f"{url}?ca={authority.file}", HOLDFAST_TOKEN=keeper.admin)
        assert [each["name"] for each in shown.json] == ["contoso"]


async def test_with_an_authority_for_clients_only_their_certificates_come_in(tmp_path: Path) -> None:
    authority, clients = Authority(tmp_path, "authority"), Authority(tmp_path, "clients")
    certificate, key = clients.signed("worker")
    foreign, foreign_key = authority.signed("foreign")
    with KeeperServer.temporary(**settings(authority, client_ca=str(clients.file))) as keeper:
        url = keeper.url.replace("holdfast://", "holdfasts://") + f"?ca={authority.file}"
        async with holdfast.open(f"{url}&certificate={certificate}&key={key}", token=keeper.admin) as store:
            await store.space("contoso").records.set("k", 1)
        for wrong in (url, f"{url}&certificate={foreign}&key={foreign_key}"):
            with pytest.raises(Unavailable):
                await holdfast.open(wrong, token=keeper.admin)
        secure = keeper.http.replace("http://", "https://")
        trusting = ssl.create_default_context(cafile=str(authority.file))
        async with httpx.AsyncClient(verify=trusting) as web:
            with pytest.raises(httpx.HTTPError):
                await web.get(f"{secure}/healthz")
        trusting.load_cert_chain(certificate, key)
        async with httpx.AsyncClient(verify=trusting) as web:
            assert (await web.get(f"{secure}/healthz")).status_code == 200


async def test_a_unix_socket_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    keeper = KeeperServer(tmp_path)
    keeper.write_settings(listen={"unix": str(path), "binary": None, "http": None})
    keeper.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with holdfast.open(f"holdfast+unix://{path}", token=keeper.admin) as store:
            await store.space("contoso").records.set("k", 1)
            keeper.kill()
            keeper.start()  # what a crash left of the socket is no obstacle
            assert await store.space("contoso").records.get("k") == 1
        keeper.stop()
        path.unlink(missing_ok=True)
        path.write_text("somebody's file")
        refused = run("serve", "--config", str(keeper.config))
        assert (refused.code, path.read_text()) == (2, "somebody's file")
        assert "is no socket" in refused.err
    finally:
        keeper.stop()


async def test_a_certificate_that_does_not_fit_its_key_leaves_the_old_one_in_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    with KeeperServer.temporary(**settings(authority)) as keeper:
        url = keeper.url.replace("holdfast://", "holdfasts://") + f"?ca={authority.file}"
        old_key = (tmp_path / "keeper.key").read_bytes()
        authority.signed("keeper")  # a new certificate is there, and its key is not yet
        new_key = (tmp_path / "keeper.key").read_bytes()
        (tmp_path / "keeper.key").write_bytes(old_key)
        seen = keeper.log.stat().st_size
        keeper.signal(signal.SIGHUP)
        await said(keeper, seen, b"the old one stays")
        async with holdfast.open(url, token=keeper.admin) as store:
            await store.space("contoso").records.set("k", 1)
        (tmp_path / "keeper.key").write_bytes(new_key)
        keeper.signal(signal.SIGHUP)
        async with holdfast.open(url, token=keeper.admin) as store:
            assert await store.space("contoso").records.get("k") == 1


async def said(keeper: KeeperServer, seen: int, words: bytes) -> None:
    """Return when the log says so, after its first bytes."""
    async with asyncio.timeout(10):
        while words not in keeper.log.read_bytes()[seen:]:
            await asyncio.sleep(0.01)


async def test_a_keeper_does_not_take_the_socket_of_another(tmp_path: Path) -> None:
    path = tmp_path / "keeper.sock"
    keepers = [KeeperServer(tmp_path / name) for name in ("one", "two")]
    for keeper in keepers:
        keeper.write_settings(listen={"unix": str(path), "binary": None, "http": None})
    keepers[0].start()
    try:
        refused = run("serve", "--config", str(keepers[1].config))
        assert (refused.code, "another one does" in refused.err) == (14, True)
        async with holdfast.open(f"holdfast+unix://{path}", token=keepers[0].admin) as store:
            await store.space("contoso").records.set("k", 1)
    finally:
        keepers[0].stop()
