//! Saved conversations continue in another process as if nothing had happened. Files that are not snapshots of this
//! model are refused.

use std::path::Path;
use std::process::Command;

use forebay_engine::{Engine, Error, Precision, Session, TokenId};
use forebay_testing::assert_same_bits;

use crate::common::models::{KEEPING, containers, data, options, random_tokens};

const TOKENS: usize = 40;

/// Tells the other process where the files are.
const FOLDER: &str = "FOREBAY_TEST_SNAPSHOTS";

const PRECISIONS: [Precision; 2] = [Precision::Fast, Precision::Exact];

fn story() -> Vec<TokenId> {
    random_tokens(TOKENS, 160, 21)
}

fn open(family: &str, precision: Precision) -> Engine {
    let [file, _] = containers(family);
    Engine::open(&file, &options(precision)).unwrap()
}

fn name(family: &str, precision: Precision, what: &str) -> String {
    format!("{family}-{precision:?}-{what}")
}

#[test]
fn a_conversation_saved_anywhere_goes_on_in_another_process() {
    let folder = tempfile::tempdir().unwrap();
    for family in KEEPING {
        for precision in PRECISIONS {
            let engine = open(family, precision);
            let mut session = engine.session();
            let mut logits = Vec::new();
            for (i, &token) in story().iter().enumerate() {
                session.push(token).unwrap();
                session.save(&folder.path().join(name(family, precision, &i.to_string()))).unwrap();
                logits.extend(session.logits().iter().flat_map(|logit| logit.to_le_bytes()));
            }
            std::fs::write(folder.path().join(name(family, precision, "logits")), logits).unwrap();
        }
    }
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["snapshots::goes_on_where_the_other_process_stopped", "--exact", "--nocapture"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&other.stdout) + String::from_utf8_lossy(&other.stderr);
    assert!(other.status.success(), "{said}");
    assert!(said.contains("all snapshots went on"), "{said}");
}

/// The child process of the test above.
#[test]
fn goes_on_where_the_other_process_stopped() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let folder = Path::new(&folder);
    for family in KEEPING {
        for precision in PRECISIONS {
            let engine = open(family, precision);
            let vocab = engine.vocab_size();
            let logits: Vec<f32> = std::fs::read(folder.join(name(family, precision, "logits")))
                .unwrap()
                .chunks_exact(4)
                .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
                .collect();
            let row = |position: usize| &logits[position * vocab..][..vocab];
            for saved in 0..TOKENS {
                let path = folder.join(name(family, precision, &saved.to_string()));
                let mut session = Session::load(&engine, &path).unwrap();
                let what = format!("{family}, {precision:?}, saved after {saved}");
                assert_eq!(session.tokens(), &story()[..=saved], "{what}");
                assert_same_bits(session.logits(), row(saved), &what);
                for (position, &token) in story().iter().enumerate().skip(saved + 1) {
                    session.push(token).unwrap();
                    assert_same_bits(session.logits(), row(position), &format!("{what}, at {position}"));
                }
            }
        }
    }
    println!("all snapshots went on");
}

#[test]
fn a_loaded_conversation_can_go_back_as_far_as_the_saved_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    for family in KEEPING {
        let engine = open(family, Precision::Fast);
        let mut session = engine.session();
        session.extend(&story()[..20]).unwrap();
        session.extend(&story()).unwrap();
        session.save(&path).unwrap();
        let mut loaded = Session::load(&engine, &path).unwrap();
        let other = [&story()[..20], &story()[..5]].concat();
        let extended = loaded.extend(&other).unwrap();
        assert_eq!(extended.reused, 20, "{family}");
        assert_eq!(session.extend(&other).unwrap(), extended, "{family}");
        assert_same_bits(loaded.logits(), session.logits(), family);
    }
}

#[test]
fn a_new_conversation_can_be_saved_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    let engine = open("qwen3moe", Precision::Fast);
    engine.session().save(&path).unwrap();
    let mut loaded = Session::load(&engine, &path).unwrap();
    assert!(loaded.tokens().is_empty() && loaded.logits().is_empty());
    loaded.push(TokenId(3)).unwrap();
}

#[test]
fn a_damaged_snapshot_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    let engine = open("qwen3moe", Precision::Fast);
    let mut session = engine.session();
    session.extend(&story()).unwrap();
    session.save(&path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8], what: &str| {
        std::fs::write(&path, bytes).unwrap();
        let message = match Session::load(&engine, &path) {
            Err(Error::Format { path: named, message }) => {
                assert_eq!(named, path);
                message
            }
            Err(Error::Unsupported(message)) => message,
            Err(other) => panic!("{what}: {other}"),
            Ok(_) => panic!("{what} was loaded"),
        };
        assert!(message.contains("saved conversation"), "{what}: {message}");
    };
    // The first bytes, the last ones, and many between.
    let places = |len: usize| (0..300).chain((300..len - 300).step_by(977)).chain(len - 300..len);
    for at in places(whole.len()) {
        let mut damaged = whole.clone();
        damaged[at] ^= 1 << (at % 8);
        refused(&damaged, &format!("byte {at} changed"));
        refused(&whole[..at], &format!("cut at {at}"));
    }
    refused(&[&whole[..], b"more"].concat(), "with more at its end");
    refused(b"Once upon a time there was a file that is no snapshot.", "a text");

    std::fs::write(&path, &whole).unwrap();
    Session::load(&engine, &path).unwrap();
    let missing = folder.path().join("nothing");
    let error = Session::load(&engine, &missing).err().unwrap();
    assert!(matches!(error, Error::Io { .. }), "{error}");
}

#[test]
fn a_snapshot_of_another_model_or_precision_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    let engine = open("qwen3moe", Precision::Fast);
    let mut session = engine.session();
    session.extend(&story()).unwrap();
    session.save(&path).unwrap();
    let refuse = |engine: &Engine, what: &str| match Session::load(engine, &path) {
        Err(Error::Format { message, .. }) => assert!(message.contains("another model"), "{what}: {message}"),
        Err(other) => panic!("{what}: {other}"),
        Ok(_) => panic!("{what} took it"),
    };
    refuse(&open("qwen3moe", Precision::Exact), "another precision");
    refuse(&open("mixtral", Precision::Fast), "another family");
    // The same model with a different last weight: its tensor table and settings are the same.
    let mut bytes = std::fs::read(data("golden/qwen3moe.gguf")).unwrap();
    let copy = folder.path().join("model.gguf");
    std::fs::write(&copy, &bytes).unwrap();
    let moved = Engine::open(&copy, &options(Precision::Fast)).unwrap();
    Session::load(&moved, &path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&copy, &bytes).unwrap();
    refuse(&Engine::open(&copy, &options(Precision::Fast)).unwrap(), "other weights");
}

#[test]
fn a_snapshot_that_cannot_be_written_leaves_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("chat");
    let engine = open("qwen3moe", Precision::Fast);
    let mut session = engine.session();
    session.extend(&story()).unwrap();
    session.save(&path).unwrap();
    let before = std::fs::read(&path).unwrap();
    // A file name of the maximum length: the name of the temporary file beside it would be too long.
    let path = folder.path().join("c".repeat(255));
    std::fs::write(&path, &before).unwrap();
    session.push(TokenId(1)).unwrap();
    let error = session.save(&path).unwrap_err();
    assert!(error.to_string().contains("cannot save the conversation"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), before);
    session.push(TokenId(2)).unwrap();
}
