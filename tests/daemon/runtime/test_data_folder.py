"""DATA/format: folders of earlier versions are taken over, those of newer ones refused before a byte is written."""

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import os
import shutil
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from meshtraind.app import App, Config, StartError
from meshtraind.jobs.checkpoint_search import ship, spec_of
from meshtraind.runtime.data_folder import FORMAT, FormatError, read_format
from meshtraind.storage import migration
from meshtraind.storage.blobs import BlobStore
from meshtraind.storage.checkpoint_store import Checkpoint, CheckpointStore, Rejected
from meshtraind.storage.migration import migrate
from meshtraind.storage.resume_file import load_all
from meshtraind.trust.identity import load_or_create
from meshwire.checkpoints.manifest import CheckpointManifest, CheckpointName, unit_file
from meshwire.messages.local import IntroductionPolicy

JOB = "5skaevsrmvw9"
ROUND = 100
DEADLINE_S = 15.0
UNITS = (b"weights", b"moments", b"options")

# What a daemon of wire version 4 has written of a job of three devices: packed by zlib, in base 85.
MANIFEST = (
    b"c-pO3%W_*c4BhuDGIv{z2Yi$MhW<e&;{i!9RwG?`r0b-q$N$~~I(D5VbvN}wqCgP90l-7}VY%G04RN`Cw}|iL>Ilh2j%D<2Tj8F1%_dbdyi2ZD"
    b"*Smz|OOugOaXj@~Ya@qc_ikyo(mvgt_Ui_V56kbTx?C^e@`>g1<$V17r7XMUawiSaE<`4>Ivde)bLzN86GMv0B^x`wlPm0_K-yzqIELKB5`_zN"
    b"LWEW<kb0c5y?AouOmq&vopmYt81XB|5FI4Z<tM2#&{Mh79sEksV$VPZkC3Zo!HEQY11lc;3094>&{ti8p2x~zr@*5AMF$*FV-L}2Owos-t1ytH"
    b">P_cHodCy$W{81vYL`UGbN(Bh6-X4hfkcx)tdUBJSOs7zu>rBmcG}1qmjk}$E#gYu7-8R2#wVL*5NV@iN>1?2G@L0mL*7|Bv+ck}V<3!_gqdNn"
    b"B#r^G+f-(5QDPpfc~D%Y5trvRu+dy)NIj~8_>sOcD};TG6cX4-j_64`aiY8vg~h3)xRC=+z^49DS;eTeEkGQmzUsP&#zXy$GtbyH-^r;~GD$TX"
    b"hiL<Ph+K0-dKQuqJ!u9<3Qs))hXy{ww}^t;oOmoO1f12*!71$%;D;sDS*0C1=vUZB9ibt}miDR49C&z`*@zmuZv#yt&ZHvTx)Wp2CpM|=3g7;_"
    b"OzXWM{bQc!fD!xQDauqd{%;wa5mt(tg=q_s5AC06@#O?-$5PTf%uFSXK4=X!FH^@sUlC~yt6EURb9b)PVzaor=hOY#mutkgTRzGvXWsUwb-8|6"
    b"*85|XGq!fiEnjYN!Al7gllUR<W<tX8yYuPpbWyd1O!Hz>A1zChn6WhEa+3zO$+(dvk6a{K(|bi{*k&^oZ(S{2FP&QBvnbK5_lLu7If@2wS+3td"
    b"fLlKAoBTgs_G{zw`VFVe0X8y)>>Xu~X3M)}<)ixIb>-!8_sY9%DY{Y7I8+PuAbI#uIon!Avy*YHa9swnPn;X-f+$Vy$#<CM{)6|BiYe$5G<UHU"
    b"B=)y=VBfy?PQin20zR|r)I@JhkluR+;}MfbWncm5tM#Z47XsyEQ(?GsHUIREZt(>~g{$d3(h%&6^LCKa^7sM$!Rse20qxAr;`c#te!qTv5k2nk"
    b"M(}=}5hoi8dQ0lCB6x75=FoBg<+kCqUyi3P2Tf!}%Ze)&948qKjNchL4bZX|7fiH<LBbSegaM|@4Yi~W=CrvsZI%P8Q{Q>m($EV&_1<##ttSLA"
    b"BIq9^sAT1G=x7U*jAUrUItZ4;R&c7mUwphf2v8bi!|Hp+n(v2YJ8g_;GuU;vRNfkHLG-)j%kAkPH&dX;1|Kf6TRQH-&4Dl5HwiM+MbAGha(B|R"
    b"u!7sNf66`{9+*1Ic7I+4SMWWudn*TBA+_&c9~%3!TD38wJw)#-sK!2i_^|so&7A33vv~i8rkjYTCSJ=pHO<d$rtqwZx8_YvxO}!rl;6-)m(QA("
    b"XlmMjL1f~K_xzTox_t4T>|2_a=*4@~ETIIK{hwM>twHoN@cCu+3)}6$`y=$V?a#uS^c&u8w0F>Sm^wg^S4b2dPlS6pjqM9KO<Uk7m)q_9bW!Na"
    b"T#>f$*X>qYVR2W+T<QJTPG^mAu~)`j(XZ|9Ui<UwWfM4Ee%r72f4uu6$D8Ou4a+#4kGxHazF+s-6ICjJoBDN|4V@zpK2L-T3d1!GkdXt~j9!iR"
    b"oNP5zhwC1bS0L-N?Vuws-P=;*s0ou{OH#y6I{MB&DD#zl!?>H&z^0`~AuzSnfExFq1nj|fV9FRuVOt9(nqEpzEnw=wkkxwm!M-nEuilFTyq>)>"
    b"<~L)TtC=uY0Z1}Fmd+h~J1`6>B@#+uOl#C4_^+4LTEWZpUjPISW5I|TlOMI(SQ}F;Y(jITw^j$HCMnqyIMb#<o^+Hz{2ahq{1f}%#qTNM;q`!B"
    b"tmJB4!>A$IV=0)3D{?|3r(BHj`py?TExBh(&3jKJ{$Ssk*XE4`#z;SC5a!t8@JNNGPZf%6se?t4G0KJo;{+xR8C0srpcTX;JNd`_`~1rM2zbp9"
    b"IV0L`@h=44Hjm*ug*>QLRE6Q+3BetMS|u^rfszn9DjQ_~!{g&Ge*wG-Z?y"
)
JOB_FILE = (
    b"c-p0s&ubGw6vy)iD7FZdLPenmdy?Iq{Rtv^6})&B!kd}5$(Zcyc4m?^iXisnt)QSMQL~$x7*zZVmf)>w#hX2d7kkK65RYz}gZAv@%Yz5s&-=dj"
    b"wsV~!`&L^S+)C-h(=EWRR!O%P<q{Gsi~=D?x<eCT463hJEStIL1UzOTGW5f$v@H@cWOhJ9n*>o9hY<#j%{dKRaF`QXk?Rl|aYB4&!W4o*UI$ax"
    b"dsh$2&xfaPE)6wPA~P?Ka2K<F4yvJd1}M8bMJ(E=?+<ko9M6A$KDxU+yS_EMwzle)n@_UCXFpdr*3P~@c=07T_3LqOHrC=c)@k3M{_rN}V4xh$"
    b"wVr`#mbvar_F$w9v{9ngwW?ImXtYt~JrHKx6<Scy7N%byG*AuFo_uc4=?Zm$n;mEuS~R4d4l`6D<+UR1RGZm_E>=c3)EOv^(}JZOSsrJ^DH6~v"
    b"T@F)OmmqU((k$1Ae1H9^-JgBDygZ>D)<Uxw`crMGRvR}#H|tng_G|MSFr2<+O=PVs71Ask1IJRsYN$?v<tRf`x}LyR`ASHR8CD|AbT`3-R-K32"
    b"Lyld+@c$23`7=-wj7a7Fg>hc4EZul_^ej0@34cKj3w#n&0<J|Pi+dQxu16tsD8(r9tdKAkM1D-X*n*G+o?i`Qhdgk(>-oTsf!6mn?xnx)Tv~vt"
    b"NamkJo(s(KDh&y@7zRFqhn(|}5ZeOFbz>yfJQH<X+Y2DFB5*^SIyT`z?PH*mz3=wgk4GmKAlAloQay`0{;_Aykw1QKN52"
)

# The tables of versions before DATA/format.
TABLES = {
    "pins.db": "CREATE TABLE pins (device_id TEXT PRIMARY KEY, name TEXT NOT NULL, certificate_pem TEXT NOT NULL, "
    "added_at REAL NOT NULL, added_by TEXT NOT NULL, last_addresses TEXT NOT NULL) STRICT, WITHOUT ROWID",
    "jobs.db": "CREATE TABLE jobs (id TEXT PRIMARY KEY, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL, "
    "members TEXT NOT NULL, submitter TEXT NOT NULL, created_s REAL NOT NULL, started_s REAL, ended_s REAL, "
    "exit_code INTEGER, error TEXT) STRICT, WITHOUT ROWID",
}
ANNA = "01c4e27dfc8ece6827d1038cec17b813798f89e721ddb74a2c2809423b9d3362"
SPEC = '{"script": "train.py", "args": [], "sync": "bsp", "codec": "fp32", "seed": 2566543237347884561, "names": '
SPEC += '["anna", "bert", "cleo"], "generation": 1, "present": [0, 1, 2], "rounds": 61, "given_up": []}'


def config(data: Path) -> Config:
    return Config.from_options(
        listen="127.0.0.1:0", interfaces=["lo"], peers=[], mdns=False, name="cleo", data_dir=data
    )


def sealed(body: bytes) -> bytes:
    return b'{"sha256": "%s", "checkpoint": %s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)


def old_manifest(**changes: object) -> bytes:
    """Of small files; None for a field that it lacks."""
    body = json.loads(zlib.decompress(base64.b85decode(MANIFEST)))["checkpoint"]
    body["units"] = [{"size_bytes": len(unit), "sha256": hashlib.sha256(unit).hexdigest()} for unit in UNITS]
    body = {name: value for name, value in (body | changes).items() if value is not None or name == "parent"}
    return sealed(json.dumps(body, separators=(",", ":")).encode())


def write_checkpoint(data: Path, manifest: bytes, round_: int = ROUND) -> Path:
    folder = data / "jobs" / JOB / "checkpoints" / str(round_)
    folder.mkdir(parents=True)
    for number, unit in enumerate(UNITS):
        (folder / unit_file(number)).write_bytes(unit)
    (folder / "manifest.json").write_bytes(manifest)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A device that was paired with another, and was stopped during a job, all by earlier versions."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    load_or_create(folder, "cleo")
    peer = load_or_create(tmp_path / "peer", "anna")
    pin = (peer.device_id, "anna", peer.certificate_pem, 1.0, peer.device_id, '[{"host":"127.0.0.1","port":1}]')
    job = (JOB, "train", SPEC, "running", json.dumps([ANNA]), ANNA, 1795376024.3, 1795376024.4, None, None, None)
    for (name, create), row in zip(TABLES.items(), (pin, job), strict=True):
        with sqlite3.connect(folder / name) as database:
            database.execute(create)
            database.execute(f"INSERT INTO {name[:4]} VALUES ({', '.join('?' * len(row))})", row)
            database.execute("PRAGMA user_version = 1")
        database.close()
        (folder / name).chmod(0o600)
    write_checkpoint(folder, old_manifest())
    (folder / "jobs" / JOB / "job.msgpack").write_bytes(zlib.decompress(base64.b85decode(JOB_FILE)))
    return folder


def lying(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes, and everything's time of change."""
    return {
        path.relative_to(folder).as_posix(): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
    }


def content(folder: Path) -> dict[str, bytes]:
    return {name: data for name, (data, _) in lying(folder).items() if not name.endswith(".db")}


def schema(path: Path) -> int:
    database = sqlite3.connect(path)
    (number,) = database.execute("PRAGMA user_version").fetchone()
    database.close()
    return int(number)


async def started(data: Path, look: Callable[[App], None]) -> None:
    app = App(config(data))
    task = asyncio.get_running_loop().create_task(app.run(), name="app")
    async with asyncio.timeout(DEADLINE_S):
        while not (app.started or task.done()):
            await asyncio.sleep(0.01)
        if app.started:
            look(app)
        app.request_stop()
        await task


@pytest.mark.asyncio
async def test_what_earlier_versions_have_written_is_all_there(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys, pins, the history, the job that the device returns to, and checkpoints, which can be gone on from (J1)."""
    device = load_or_create(data, "cleo").device_id

    def look(app: App) -> None:
        node = app.mesh.node
        assert node.device == device
        assert [row.name for row in app.mesh.peers()] == ["anna"]
        assert [(record.id, record.state) for record in node.history.newest()] == [(JOB, "lost")]
        assert app.jobs.admission.may_return(JOB)
        assert app.mesh.introductions is IntroductionPolicy.ASK, "it was paired when trust was between two (K3)"

    with caplog.at_level(logging.INFO):
        await started(data, look)
    assert f"was of format 1 and is of format {FORMAT} now" in caplog.text
    left = load_all([data / "jobs" / JOB])[JOB]
    assert [member.name for member in left.members] == ["anna", "bert", "cleo"]
    (found,) = CheckpointStore(data / "jobs" / JOB, JOB, keep=3).listed()
    assert isinstance(found, Checkpoint)
    assert CheckpointStore(data / "jobs" / JOB, JOB, keep=3).verify(found) is None
    assert spec_of(found.manifest) == left.spec
    assert found.manifest.generation.generation(JOB).live.keys() == {0, 1, 2}
    ship(
        data / "jobs" / JOB, JOB, CheckpointName(ROUND), BlobStore(tmp_path / "blobs"), "somebody"
    )  # what it hashes lies there


@pytest.mark.asyncio
async def test_a_new_folder_says_its_format_from_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "new"
    policies = []
    with caplog.at_level(logging.INFO):
        await started(data, lambda app: policies.append(app.mesh.introductions))
    assert policies == [IntroductionPolicy.ACCEPT]
    assert read_format(data) == FORMAT
    assert (data / "format").read_text().startswith(f"{FORMAT} written by meshtrain ")
    assert (schema(data / "pins.db"), schema(data / "jobs.db")) == (FORMAT, FORMAT)
    assert "of format" not in caplog.text
    before = lying(data)["format"]
    await started(data, lambda _: None)
    assert lying(data)["format"] == before


@pytest.mark.asyncio
async def test_a_downgrade_is_refused_before_anything_is_written(data: Path) -> None:
    """The newer version is named, and so is what to do."""
    (data / "format").write_text(f"{FORMAT + 1} written by meshtrain 9.1.0 (wire version 77)\n")
    before = lying(data)
    with pytest.raises(StartError) as refused:
        await started(data, lambda _: None)
    assert lying(data) == before
    for part in (str(data), "meshtrain 9.1.0 (wire version 77)", f"format {FORMAT + 1}", f"up to {FORMAT}", "--data-"):
        assert part in str(refused.value)


def test_versions_that_know_no_format_are_locked_out_before_the_first_change(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They look into the databases, before they write: what is there is newer than all that they know."""

    def killed(_self: CheckpointStore) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(CheckpointStore, "respell", killed)
    with pytest.raises(KeyboardInterrupt):
        migrate(data, "1.0")
    assert (schema(data / "pins.db"), schema(data / "jobs.db"), read_format(data)) == (FORMAT, FORMAT, 1)


def test_a_manifest_is_spelled_as_today_and_what_is_broken_stays(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What an earlier version did not know has its default; what is sent of a checkpoint is hashed as it is spelled."""
    folder = write_checkpoint(data, old_manifest(round=101, format=None), round_=101)
    damaged = write_checkpoint(data, old_manifest(round=102)[:-9], round_=102)
    linked = data / "jobs" / ("0" * 12)
    linked.mkdir()
    (linked / "checkpoints").symlink_to(damaged.parent)
    store = CheckpointStore(data / "jobs" / JOB, JOB, keep=9)
    units = lying(data)
    migrate(data, "1.0")
    spelled = (folder / "manifest.json").read_bytes()
    assert (
        spelled == CheckpointManifest.decode(spelled).encode() != units[f"jobs/{JOB}/checkpoints/101/manifest.json"][0]
    )
    newest, found, _ = store.listed()
    assert isinstance(newest, Rejected)
    assert (damaged / "manifest.json").read_bytes() == old_manifest(round=102)[:-9]
    assert "102 stays as it is" in caplog.text
    assert isinstance(found, Checkpoint)
    ship(data / "jobs" / JOB, JOB, CheckpointName(101), BlobStore(tmp_path / "blobs"), "somebody")
    assert not list(data.rglob("*.part"))


def test_a_migration_that_is_killed_anywhere_is_done_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each write, before it and after it; nobody can tell afterwards."""
    write_checkpoint(data, old_manifest(round=101, format=None), round_=101)
    write_checkpoint(data, old_manifest(round=102, format=None), round_=102)
    whole = shutil.copytree(data, tmp_path / "whole")
    migrate(whole, "1.0")
    left = 0

    def dying(write: Callable[..., object]) -> Callable[..., object]:
        def step(*given: object, **named: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
            done = write(*given, **named)
            left -= 1
            if left == 0:
                if isinstance(done, int):
                    os.close(done)  # as a process does that ends
                raise KeyboardInterrupt
            return done

        return step

    with monkeypatch.context() as patch:
        patch.setattr(migration, "_lock_out", dying(migration._lock_out))
        patch.setattr(os, "open", dying(os.open))
        patch.setattr(os, "fsync", dying(lambda _descriptor: None))  # nobody cuts the power here, and disks are slow
        patch.setattr(Path, "replace", dying(Path.replace))
        for deaths in itertools.count(1):
            one = shutil.copytree(data, tmp_path / f"killed{deaths}")
            left = deaths
            try:
                migrate(one, "1.0")
            except KeyboardInterrupt:
                left = 0
            else:
                break
            migrate(one, "1.0")
            assert (read_format(one), schema(one / "pins.db"), schema(one / "jobs.db")) == 3 * (FORMAT,)
            assert content(one) == content(whole)
    assert deaths > 20


def test_a_full_disk_is_named_and_loses_nothing(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(data, old_manifest(round=101, format=None), round_=101)
    before = content(data)

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(FormatError) as refused:
            migrate(data, "1.0")
    assert f"from format 1 to {FORMAT}: " in str(refused.value)
    assert "No space left" in str(refused.value)
    after = content(data)
    assert {name: after[name] for name in before} == before
    migrate(data, "1.0")
    assert read_format(data) == FORMAT


@pytest.mark.parametrize("text", ["", "2", "0 written by x\n", "two written by x\n", "2 written by x", "9" * 20_000])
def test_a_damaged_format_is_named(data: Path, text: str) -> None:
    (data / "format").write_text(text)
    with pytest.raises(FormatError, match="format is damaged: restore it"):
        read_format(data)
