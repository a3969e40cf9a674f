"""What belongs to this user, and what somebody else could have put there."""

import errno
import os

import pytest

from diloco_local import _files as _own
from diloco_local._files import check_own_folder, check_root, open_own, open_own_stream
from diloco_protocol import InvalidRequestError

ANOTHER_USER = 12_345


def link(path, target):
    path.symlink_to(target)


def give_away(path):
    """Make a file or folder another user's, which only root can do."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, ANOTHER_USER, -1)


def folder_of_another(path):
    path.mkdir()
    give_away(path)


def folder_with(mode):
    def make(path):
        path.mkdir()
        path.chmod(mode)

    return make


def linked_folder(path):
    target = path.with_name("the-real-one")
    target.mkdir()
    path.symlink_to(target)


FOREIGN_FOLDERS = {
    "another's": (folder_of_another, f"of the user {ANOTHER_USER}"),
    "a link": (linked_folder, "is a link"),
    "a file": (lambda path: path.touch(), "not a folder"),
    "the group's": (folder_with(0o770), "no other can write to"),
    "everybody's": (folder_with(0o707), "no other can write to"),
    "sticky": (folder_with(0o1777), "no other can write to"),
}


@pytest.mark.parametrize("kind", FOREIGN_FOLDERS)
def test_a_folder_that_others_can_fill_is_refused(tmp_path, kind):
    make, words = FOREIGN_FOLDERS[kind]
    make(tmp_path / "folder")
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_own_folder(tmp_path / "folder")
    assert str(tmp_path / "folder") in str(caught.value)


def test_a_folder_of_ones_own_is_fine(tmp_path):
    check_own_folder(tmp_path / "missing")
    (tmp_path / "file").touch()
    check_own_folder(tmp_path / "file" / "below-a-file")
    for mode in (0o700, 0o755):
        folder_with(mode)(tmp_path / f"{mode:o}")
        check_own_folder(tmp_path / f"{mode:o}")


def test_a_root_in_which_everybody_can_replace_things_is_refused(tmp_path):
    check_root(tmp_path)
    check_root(tmp_path / "missing")
    tmp_path.chmod(0o1777)  # as /tmp is: what is there can only be replaced by its owner
    check_root(tmp_path)
    tmp_path.chmod(0o775)  # what some systems give to every new folder
    check_root(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidRequestError, match="chmod o-w"):
        check_root(tmp_path)
    tmp_path.chmod(0o700)


def file_of_another(path):
    path.touch()
    give_away(path)


def linked_file(path):
    target = path.with_name("the-real-one")
    target.write_text("secret")
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (file_of_another, f"of the user {ANOTHER_USER}"),
        (linked_file, "is a link"),
        (os.mkfifo, "not a file"),
        (lambda path: path.mkdir(), "not a file"),
    ],
)
@pytest.mark.parametrize("mode", ["rb", "ab"])
def test_a_file_that_is_not_ones_own_is_not_opened(tmp_path, make, words, mode):
    make(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match=words):
        open_own_stream(tmp_path / "file", mode)


def test_a_link_is_not_written_through(tmp_path):
    linked_file(tmp_path / "file")
    with pytest.raises(InvalidRequestError, match="is a link"):
        open_own_stream(tmp_path / "file", "ab")
    link(tmp_path / "dangling", tmp_path / "not-yet")
    with pytest.raises(InvalidRequestError, match="is a link"):
        open_own_stream(tmp_path / "dangling", "ab")
    assert (tmp_path / "the-real-one").read_text() == "secret"
    assert not (tmp_path / "not-yet").exists()


@pytest.mark.parametrize("kind", sorted(FOREIGN_FOLDERS.keys() - {"a file"}))
def test_nothing_is_opened_in_a_folder_that_others_can_fill(tmp_path, kind):
    make, words = FOREIGN_FOLDERS[kind]
    make(tmp_path / "folder")
    with pytest.raises(InvalidRequestError, match=words):
        open_own(tmp_path / "folder" / "file", os.O_WRONLY | os.O_CREAT)
    assert list((tmp_path / "folder").iterdir()) == []


def test_what_is_made_is_for_the_owner_alone(tmp_path):
    with open_own_stream(tmp_path / "file", "ab") as stream:
        stream.write(b"one")
        assert not os.get_inheritable(stream.fileno())
        assert os.get_blocking(stream.fileno())
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    with pytest.raises(InvalidRequestError, match="not a FIFO"):
        open_own(tmp_path / "file", os.O_RDWR, fifo=True)


def test_what_is_closed_to_its_owner_is_refused(tmp_path, monkeypatch):
    """The superuser can open everything, so the refusal is made here."""

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "closed")

    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(_own.os, "open", refuse)
        with pytest.raises(InvalidRequestError, match="can open and no other"):
            _own.open_own(tmp_path / "file", os.O_RDONLY)
    monkeypatch.setattr(_own, "_open_folder", lambda _: os.open(tmp_path, os.O_RDONLY))
    opened = os.open
    monkeypatch.setattr(
        _own.os, "open", lambda *a, **k: refuse() if a[0] == "file" else opened(*a, **k)
    )
    with pytest.raises(InvalidRequestError, match="can open and no other"):
        _own.open_own(tmp_path / "file", os.O_RDONLY)
