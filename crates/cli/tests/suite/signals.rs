//! Ctrl-C, and readers that go away.

#![cfg(unix)]

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::common::{Outcome, demo_model, forebay, interrupt, signal_mask, text};

/// An answer that takes a while.
const LONG: [&str; 10] = [
    "run",
    "-p",
    "Tell me a story.",
    "--exact",
    "--threads",
    "1",
    "--ignore-eos",
    "-n",
    "100000",
    "--temp=0",
];

/// When a program that was asked to end is taken to hang. That it ended because it was asked to, its exit code says.
const LIMIT: Duration = Duration::from_secs(60);

/// Waits until the program has taken Ctrl-C over.
fn wait_for_handler(child: &Child) {
    if !cfg!(target_os = "linux") {
        std::thread::sleep(Duration::from_secs(2));
        return;
    }
    let start = Instant::now();
    // SIGINT is signal 2, and bit 1 of the mask.
    while signal_mask(child, "SigCgt:").expect("the program runs") & 2 == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "Ctrl-C is not handled");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What is left to read of a program that ends soon.
#[track_caller]
fn end_of(mut child: Child) -> Outcome {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("still running after {LIMIT:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait_with_output().unwrap().into()
}

fn read_some(child: &mut Child) {
    child.stdout.as_mut().unwrap().read_exact(&mut [0; 40]).unwrap();
}

#[test]
fn an_interrupt_ends_an_answer_with_the_text_so_far() {
    let mut child = forebay(LONG).spawn().unwrap();
    read_some(&mut child);
    interrupt(&child);
    let end = end_of(child);
    assert_eq!((end.code, end.stderr.as_str()), (Some(130), ""));
    assert!(end.stdout.ends_with('\n'), "{:?}", end.stdout);
}

#[test]
fn an_interrupted_answer_in_json_is_an_answer() {
    let child = forebay(LONG).arg("--json").spawn().unwrap();
    wait_for_handler(&child);
    // At any moment; most often in the middle of the answer.
    std::thread::sleep(Duration::from_millis(300));
    interrupt(&child);
    let end = end_of(child);
    assert_eq!((end.code, end.stderr.as_str()), (Some(130), ""));
    let answer: serde_json::Value = serde_json::from_str(&end.stdout).unwrap();
    assert_eq!(answer["finish_reason"], "cancelled");
    assert_eq!(answer["stats"]["generated_tokens"], answer["tokens"].as_array().unwrap().len());
}

#[test]
fn a_second_interrupt_ends_the_program_at_once() {
    // Standard output is full and nobody reads it, so the program cannot end by itself after the first interrupt.
    let (reader, mut writer) = UnixStream::pair().unwrap();
    writer.set_nonblocking(true).unwrap();
    for size in [4096, 1] {
        while writer.write_all(&vec![b'.'; size]).is_ok() {}
    }
    writer.set_nonblocking(false).unwrap();
    let mut child = forebay(LONG).stdout(OwnedFd::from(writer)).spawn().unwrap();
    wait_for_handler(&child);
    interrupt(&child);
    assert!(child.try_wait().unwrap().is_none(), "standard output is not full");
    // Two that come before the program has looked at the first are one to it.
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() && start.elapsed() < LIMIT {
        interrupt(&child);
        std::thread::sleep(Duration::from_millis(50));
    }
    let end = end_of(child);
    assert_eq!((end.code, end.stderr.as_str()), (Some(130), ""));
    drop(reader);
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut child = forebay(LONG).spawn().unwrap();
    read_some(&mut child);
    drop(child.stdout.take());
    let end = end_of(child);
    assert_eq!((end.code, end.stderr.as_str()), (Some(0), ""));
}

#[test]
fn interrupted_logits_leave_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let tokens = vec!["1"; 1024].join(",");
    let out = text(&folder.path().join("out"));
    let args = ["logits", &demo_model(), "--exact", "--threads", "1", "--tokens", &tokens, "--out", &out];
    let child = forebay(args).spawn().unwrap();
    wait_for_handler(&child);
    interrupt(&child);
    let end = end_of(child);
    assert_eq!((end.code, end.stdout.as_str(), end.stderr.as_str()), (Some(130), "", ""));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
