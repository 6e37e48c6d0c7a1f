//! What `--out` may name and what becomes of it, and exit codes that no reader of stdout changes.
#![cfg(unix)]

mod common;

use std::ffi::OsString;
use std::io::pipe;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use common::{Run, Tensors, fixture, folder, kimi_decode};

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<OsString> {
    let mut names: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    names
}

/// A command with an input of its own in a folder of its own.
struct Case {
    command: &'static str,
    folder: PathBuf,
    file: PathBuf,
}

impl Case {
    /// Both commands that write, each with its smallest fixture.
    fn each(test: &str) -> [Case; 2] {
        [("index", "index_exact_ties"), ("query", "mla_query_h6")].map(|(command, name)| {
            let folder = folder(&format!("{test}-{command}"));
            let file = folder.join("step.safetensors");
            std::fs::copy(fixture(name), &file).unwrap();
            Case { command, folder, file }
        })
    }

    fn args(&self, file: &Path, out: &Path) -> Vec<OsString> {
        let mut args: Vec<OsString> = vec![self.command.into(), file.into(), "--device".into(), "sim".into()];
        if self.command == "query" {
            args.extend(["--batch".into(), "1".into()]);
        }
        args.extend(["--out".into(), out.into()]);
        args
    }

    fn run(&self, out: &Path) -> Run {
        kimi_decode(self.args(&self.file, out))
    }

    /// Refused before the step runs, which would have printed something; nothing else in the folder.
    #[track_caller]
    fn refused(&self, out: impl AsRef<Path>, says: &str) {
        let before = (names(&self.folder), std::fs::read(&self.file).unwrap());
        let run = self.run(out.as_ref());
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{}: {}", self.command, run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{}", run.stderr);
        assert!(run.stderr.contains("--out") && run.stderr.contains(says), "no {says:?} in {}", run.stderr);
        assert!((names(&self.folder), std::fs::read(&self.file).unwrap()) == before, "nothing is touched");
    }

    #[track_caller]
    fn written(&self, out: &Path) {
        let run = self.run(out);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{}", run.stdout);
        assert!(run.stdout.contains("wrote "), "{}", run.stdout);
        assert!(Tensors::read(out).tensors.len() >= 3);
    }
}

#[test]
fn the_input_is_never_the_output() {
    for case in Case::each("same") {
        case.refused(&case.file, "is the input");
        let name = case.folder.file_name().unwrap();
        case.refused(case.folder.join("..").join(name).join("step.safetensors"), "is the input");
        symlink("step.safetensors", case.folder.join("link")).unwrap();
        case.refused(case.folder.join("link"), "is the input");
        symlink(&case.folder, case.folder.join("here")).unwrap();
        case.refused(case.folder.join("here/step.safetensors"), "is the input");
        // The input by a link, the output by its name.
        let run = kimi_decode(case.args(&case.folder.join("link"), &case.file));
        assert_eq!(run.code, 2, "{}", run.stdout);
    }
}

#[test]
fn only_regular_files_are_replaced() {
    for case in Case::each("irregular") {
        let at = |name: &str| case.folder.join(name);
        case.refused(&case.folder, "is a folder");
        // Nothing outside the folder is named, where a version that is wrong would replace it.
        assert!(Command::new("mkfifo").arg(at("fifo")).status().unwrap().success());
        case.refused(at("fifo"), "is no regular file");
        // The path of a socket is short, whatever the folder's.
        let socket = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("s{}", std::process::id()));
        let bound = UnixListener::bind(&socket).and_then(|_| std::fs::rename(&socket, at("socket")));
        match bound {
            Ok(()) => case.refused(at("socket"), "is no regular file"),
            Err(error) => println!("SKIPPED sockets: {error}"),
        }
        for (to, link, says) in [
            ("fifo", "to-fifo", "is no regular file"),
            (".", "to-folder", "is a folder"),
            ("nothing", "to-nothing", "is a link to nothing"),
        ] {
            symlink(to, at(link)).unwrap();
            case.refused(at(link), says);
            assert!(at(link).is_symlink());
        }
    }
}

#[test]
fn links_to_files_stay_links() {
    for case in Case::each("links") {
        let (real, link) = (case.folder.join("real"), case.folder.join("link"));
        std::fs::write(&real, "old").unwrap();
        symlink("real", &link).unwrap();
        case.written(&link);
        assert!(link.is_symlink() && !real.is_symlink());
        Tensors::read(&real);
        case.written(&real);
        assert_eq!(names(&case.folder), ["link", "real", "step.safetensors"]);
    }
}

#[test]
fn places_that_cannot_be_written_are_refused_before_the_step() {
    for case in Case::each("unwritable") {
        case.refused(case.folder.join("no/out"), "there is no folder");
        case.refused(case.folder.join("out/"), "names no file");
        case.refused(case.folder.join("out/."), "names no file");
        case.refused(case.folder.join("no/.."), "names no file");
        case.refused("", "");
        case.refused(case.file.join("out"), "");
        case.refused(case.folder.join("x".repeat(256)), "");
        if cfg!(target_os = "linux") {
            case.refused("/proc/out.safetensors", "cannot be written");
        }
        case.written(&case.folder.join("x".repeat(255)));
        assert_eq!(names(&case.folder).len(), 2);
    }
}

#[test]
fn a_file_that_was_begun_is_removed_when_the_device_is_refused() {
    for case in Case::each("begun") {
        let out = case.folder.join("out");
        let args = [case.command, case.file.to_str().unwrap(), "--device", "cuda:4096", "--out", out.to_str().unwrap()];
        assert_eq!(kimi_decode(args).code, 2);
        assert_eq!(names(&case.folder), ["step.safetensors"]);
    }
}

/// The exit code with nobody at the other end of stdout.
fn unread(args: Vec<OsString>) -> (Option<i32>, String) {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    let output =
        Command::new(env!("CARGO_BIN_EXE_kimi-decode")).args(args).stdout(writer).stderr(Stdio::piped()).output();
    let output = output.unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn the_outcome_does_not_depend_on_who_reads_stdout() {
    for case in Case::each("unread") {
        let out = case.folder.join("out");
        assert_eq!(unread(case.args(&case.file, &out)), (Some(0), String::new()));
        Tensors::read(&out);
        std::fs::remove_file(&out).unwrap();

        let mut spoilt = Tensors::read(&case.file);
        let name = if case.command == "index" { "expected.ids" } else { "expected.qc" };
        let data = spoilt.data(name);
        data[..4].copy_from_slice(&[0x5A; 4]);
        let file = case.folder.join("spoilt");
        spoilt.write(&file);
        let (code, stderr) = unread(case.args(&file, &out));
        assert_eq!((code, stderr.lines().count()), (Some(1), 1), "{stderr}");
        Tensors::read(&out);
        if cfg!(target_os = "linux") {
            let full = || std::fs::File::options().write(true).open("/dev/full").unwrap();
            let mut command = Command::new(env!("CARGO_BIN_EXE_kimi-decode"));
            assert_eq!(command.args(case.args(&file, &out)).stdout(full()).output().unwrap().status.code(), Some(1));
            let mut command = Command::new(env!("CARGO_BIN_EXE_kimi-decode"));
            let run = command.args(case.args(&case.file, &out)).stdout(full()).output().unwrap();
            assert_eq!(run.status.code(), Some(2), "a report that is lost is told");
            assert!(String::from_utf8_lossy(&run.stderr).contains("stdout: "));
        }
    }
}
