//! Downloads from a hub: `pull`, `list`, `rm`, and models that are named as the hub names them.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::common::hub::{COMMIT, Fault, Hub, REPO, git_sha1, sha256};
#[cfg(unix)]
use crate::common::interrupt;
use crate::common::{Outcome, demo_model, golden, text};

const FILE: &str = "Some-Model-Q4_K_M.gguf";

fn model() -> Vec<u8> {
    fs::read(golden("qwen3moe.gguf")).unwrap()
}

/// A hub with one model, and a folder for downloads.
fn one_model() -> (Hub, TempDir, Vec<u8>) {
    let bytes = model();
    (Hub::new(vec![(FILE, bytes.clone()), ("README.md", b"about".to_vec())]), tempdir().unwrap(), bytes)
}

fn named(quant: &str) -> String {
    format!("{REPO}:{quant}")
}

fn repo_folder(home: &Path) -> PathBuf {
    home.join("hub/models--someone--Some-Model-GGUF")
}

fn blobs(home: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(repo_folder(home).join("blobs")) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// What `inspect` says without the memory that it measures anew each time.
fn lasting(inspected: &str) -> Vec<&str> {
    inspected.lines().filter(|line| !line.contains(" memory ")).collect()
}

/// One part of a split model with a tensor in each.
fn part(index: u16, count: u16) -> Vec<u8> {
    let string = |s: &str| [&(s.len() as u64).to_le_bytes(), s.as_bytes()].concat();
    let key = |name: &str, kind: u32, value: &[u8]| [&string(name), &kind.to_le_bytes()[..], value].concat();
    let mut bytes = [&b"GGUF"[..], &3_u32.to_le_bytes(), &1_u64.to_le_bytes(), &4_u64.to_le_bytes()].concat();
    bytes.extend(key("general.architecture", 8, &string("llama")));
    bytes.extend(key("split.no", 2, &index.to_le_bytes()));
    bytes.extend(key("split.count", 2, &count.to_le_bytes()));
    bytes.extend(key("split.tensors.count", 5, &i32::from(count).to_le_bytes()));
    bytes.extend(string(&format!("blk.{index}.attn_norm.weight")));
    bytes.extend(
        [&1_u32.to_le_bytes()[..], &32_u64.to_le_bytes(), &0_u32.to_le_bytes(), &0_u64.to_le_bytes()]
            .concat(),
    );
    bytes.resize(bytes.len().next_multiple_of(32) + 128, 0);
    bytes
}

#[test]
fn a_model_is_downloaded_checked_and_used_by_its_name() {
    let (hub, home, bytes) = one_model();
    let path = hub.call(home.path(), &["pull", &named("q4_k_m")]).success();
    let path = Path::new(path.trim_end());
    assert_eq!(path, repo_folder(home.path()).join("snapshots").join(COMMIT).join(FILE));
    assert_eq!(fs::read(path).unwrap(), bytes);
    assert_eq!(blobs(home.path()), [sha256(&bytes)]);
    assert_eq!(fs::read_to_string(repo_folder(home.path()).join("refs/main")).unwrap(), COMMIT);
    let link = fs::read_link(path).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(sha256(&bytes)));

    // Nothing is downloaded twice, and nobody is asked for what is here.
    let large = hub.requests("/large/").len();
    assert_eq!(hub.call(home.path(), &["pull", REPO]).success().trim_end(), text(path));
    assert_eq!(hub.requests("/large/").len(), large);
    let offline = |args: &[&str]| -> Outcome {
        hub.command(home.path(), args).env("HF_HUB_OFFLINE", "1").output().unwrap().into()
    };
    let inspected = offline(&["inspect", &named("Q4_K_M")]).success();
    assert_eq!(lasting(&inspected), lasting(&offline(&["inspect", &text(path)]).success()));
    offline(&["inspect", REPO]).success();
    offline(&["plan", REPO, "--no-probe"]).success();
    let ids = offline(&["tokenize", REPO, "--text", "Hello", "--ids"]).success();
    assert_eq!(ids, offline(&["tokenize", &text(path), "--text", "Hello", "--ids"]).success());
    assert_eq!(offline(&["run", REPO, "-p", "x", "--raw", "-n", "2"]).code, Some(0));
    let refused = offline(&["pull", REPO]).failure(1);
    assert!(refused.contains("HF_HUB_OFFLINE"), "{refused}");
}

#[test]
fn a_cut_connection_is_resumed_where_it_was_cut() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[Fault::Cut(100_000), Fault::Cut(0), Fault::Cut(50_000)]);
    let path = hub.call(home.path(), &["pull", REPO]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
    let ranges: Vec<_> = hub.requests("/large/").into_iter().map(|r| r.range).collect();
    let at = |from: u64| Some(format!("bytes={from}-"));
    assert_eq!(ranges, [None, at(100_000), at(100_000), at(150_000)]);
}

#[test]
fn a_connection_that_is_always_cut_is_given_up_and_continued_by_the_next_call() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[Fault::Cut(70_000), Fault::Cut(0), Fault::Cut(0)]);
    let error = hub.call(home.path(), &["pull", REPO, "--retries", "1"]).failure(1);
    assert!(error.contains("the connection was cut"), "{error}");
    assert_eq!(blobs(home.path()), [format!("{}.part", sha256(&bytes))]);
    let list = hub.call(home.path(), &["list"]).success();
    assert!(list.contains("68.4 KiB") && list.contains("incomplete"), "{list}");
    let path = hub.call(home.path(), &["pull", REPO]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
    assert_eq!(hub.requests("/large/").last().unwrap().range.as_deref(), Some("bytes=70000-"));
}

#[test]
fn a_hub_that_ignores_ranges_sends_everything_again() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[Fault::Cut(70_000), Fault::IgnoreRange]);
    let path = hub.call(home.path(), &["pull", REPO]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_a_download_which_can_be_continued() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[Fault::Stall(80_000)]);
    let child = hub.command(home.path(), &["pull", REPO]).spawn().unwrap();
    let part = repo_folder(home.path()).join("blobs").join(format!("{}.part", sha256(&bytes)));
    while fs::metadata(&part).map_or(0, |m| m.len()) < 80_000 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // The second ends the program although it waits for bytes.
    for _ in 0..2 {
        interrupt(&child);
    }
    let outcome: Outcome = child.wait_with_output().unwrap().into();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(130), ""));
    let path = hub.call(home.path(), &["pull", REPO]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
    assert_eq!(hub.requests("/large/").last().unwrap().range.as_deref(), Some("bytes=80000-"));
}

#[test]
fn a_wrong_checksum_is_refused_and_leaves_nothing() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[Fault::Damage]);
    let error = hub.call(home.path(), &["pull", REPO]).failure(1);
    assert!(
        error.contains(FILE) && error.contains("wrong checksum") && error.contains("pull it again"),
        "{error}"
    );
    assert_eq!(blobs(home.path()), [""; 0]);
    let error = hub.call(home.path(), &["run", REPO, "-p", "x"]).failure(1);
    assert!(error.contains("forebay pull"), "{error}");
    hub.call(home.path(), &["pull", REPO]).success();

    // Damage on the drive is found when it is looked for.
    let blob = repo_folder(home.path()).join("blobs").join(sha256(&bytes));
    let mut damaged = bytes.clone();
    damaged[99] ^= 1;
    fs::write(&blob, damaged).unwrap();
    let outcome = hub.call(home.path(), &["pull", REPO, "--verify"]);
    assert!(outcome.code == Some(0) && outcome.stderr.contains("was damaged"), "{outcome:?}");
    assert_eq!(fs::read(&blob).unwrap(), bytes);
    hub.call(home.path(), &["pull", REPO, "--verify"]).success();
}

#[test]
fn a_damaged_beginning_is_downloaded_anew() {
    let (hub, home, bytes) = one_model();
    let blobs = repo_folder(home.path()).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    for beginning in [vec![7; 50_000], vec![7; bytes.len()], vec![7; bytes.len() + 1]] {
        fs::write(blobs.join(format!("{}.part", sha256(&bytes))), beginning).unwrap();
        let path = hub.call(home.path(), &["pull", REPO]).success();
        assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
        fs::remove_file(blobs.join(sha256(&bytes))).unwrap();
    }
}

#[test]
fn two_programs_do_not_download_the_same_file_together() {
    let (hub, home, bytes) = one_model();
    let blobs = repo_folder(home.path()).join("blobs");
    fs::create_dir_all(&blobs).unwrap();
    let other = fs::File::create(blobs.join(format!("{}.part", sha256(&bytes)))).unwrap();
    other.lock().unwrap();
    let error = hub.call(home.path(), &["pull", REPO]).failure(1);
    assert!(error.contains("another program is downloading") && error.contains(FILE), "{error}");
    drop(other);
    hub.call(home.path(), &["pull", REPO]).success();
}

#[test]
fn refusals_say_what_to_do() {
    let (hub, home, _) = one_model();
    let call = |args: &[&str]| hub.call(home.path(), args).failure(1);
    hub.fail(&[Fault::Refuse(401, "X-Error-Message: Invalid credentials\r\n")]);
    let error = call(&["pull", REPO]);
    assert!(
        error.contains(REPO) && error.contains("without a token") && error.contains("HF_TOKEN"),
        "{error}"
    );
    assert!(error.contains("Invalid credentials"), "{error}");

    fs::write(home.path().join("token"), "hf_secret\n").unwrap();
    hub.fail(&[Fault::Refuse(401, "")]);
    let error = call(&["pull", REPO]);
    assert!(error.contains("does not accept your token") && !error.contains("hf_secret"), "{error}");
    hub.fail(&[Fault::RefuseFile(403, "X-Error-Code: GatedRepo\r\n")]);
    let error = call(&["pull", REPO]);
    assert!(error.contains(&format!("ask for access at {}/{REPO}", hub.address)), "{error}");

    let error = call(&["pull", "someone/else"]);
    assert!(error.contains("has no someone/else (Repository not found); check the spelling"), "{error}");
    hub.fail(&[Fault::RefuseFile(404, "")]);
    assert!(call(&["pull", REPO]).contains("check the spelling"));

    hub.fail(&[Fault::Refuse(429, "Retry-After: 4000\r\n")]);
    let error = call(&["pull", REPO]);
    assert!(error.contains("too many requests") && error.contains("try again in 4000 s"), "{error}");
    hub.fail(&[Fault::Refuse(429, ""), Fault::Refuse(429, "")]);
    let error = call(&["pull", REPO, "--retries", "1"]);
    assert!(error.contains("try again later"), "{error}");
    hub.fail(&[Fault::Refuse(500, "")]);
    assert!(call(&["pull", REPO, "--retries", "0"]).contains("status 500"));
    assert_eq!(hub.faults_left(), 0);

    let nobody = hub
        .command(home.path(), &["pull", REPO, "--retries", "0"])
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .output();
    let error = Outcome::from(nobody.unwrap()).failure(1);
    assert!(error.contains("cannot reach http://127.0.0.1:9"), "{error}");
}

#[test]
fn what_passes_is_waited_for() {
    let (hub, home, bytes) = one_model();
    hub.fail(&[
        Fault::Refuse(429, "Retry-After: 0\r\n"),
        Fault::Refuse(503, ""),
        Fault::RefuseFile(429, "Retry-After: 1\r\n"),
        Fault::Cut(10_000),
        Fault::RefuseFile(502, ""),
    ]);
    let start = std::time::Instant::now();
    let path = hub.call(home.path(), &["pull", REPO]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
    assert_eq!(hub.faults_left(), 0);
    assert!(start.elapsed() >= std::time::Duration::from_secs(1), "the hub's wish is respected");
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let (hub, home, _) = one_model();
    let output = hub.command(home.path(), &["pull", REPO]).env("HF_TOKEN", "hf_mine").output().unwrap();
    Outcome::from(output).success();
    let token = Some("Bearer hf_mine".to_owned());
    assert_eq!(hub.requests("/api/")[0].token, token);
    assert_eq!(hub.requests(&format!("/{REPO}/resolve/"))[0].token, token);
    let large = &hub.requests("/large/")[0];
    assert!(large.host.starts_with("localhost"), "{}", large.host);
    assert_eq!(large.token, None);
}

#[test]
fn what_does_not_fit_on_the_drive_is_refused_first() {
    let (hub, home, _) = one_model();
    hub.lie(FILE, 1 << 43);
    let error = hub.call(home.path(), &["pull", REPO]).failure(1);
    assert!(
        error.contains("needs 8.0 TiB, but") && error.contains("is free in") && error.contains("HF_HOME"),
        "{error}"
    );
    assert!(hub.requests("/large/").is_empty());
    assert_eq!(blobs(home.path()), [""; 0]);
    // A size that no file has, and one that is not true.
    hub.lie("README.md", u64::MAX);
    assert!(hub.call(home.path(), &["pull", REPO]).failure(1).contains("cannot have"));
}

#[test]
fn all_parts_of_a_split_model_are_downloaded_and_it_is_removed_with_its_blobs() {
    let (a, b) =
        ("UD-Q4_K_XL/M-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL/M-UD-Q4_K_XL-00002-of-00002.gguf");
    let files =
        vec![(a, part(0, 2)), (b, part(1, 2)), ("M-Q8_0.gguf", model()), ("M-IQ2_M.gguf", vec![1; 5])];
    let (hub, home) = (Hub::new(files), tempdir().unwrap());
    let call = |args: &[&str]| hub.call(home.path(), args);

    let error = call(&["pull", &named("Q3_K_S")]).failure(1);
    assert!(
        error.contains("does not exist")
            && error.contains("UD-Q4_K_XL (")
            && error.contains("Q8_0 (582.7 KiB)"),
        "{error}"
    );
    let dry = call(&["pull", &named("ud-q4_k_xl"), "--dry-run"]).success();
    assert!(dry.contains(a) && dry.contains(b) && dry.contains("to download"), "{dry}");
    assert!(hub.requests("/large/").is_empty());

    // Without a wish it is said what else there is.
    let outcome = call(&["pull", REPO]);
    let expected = format!("downloading {} (", named("UD-Q4_K_XL"));
    assert!(
        outcome.stderr.starts_with(&expected)
            && outcome.stderr.contains("the repository also has IQ2_M (5 B), Q8_0")
    );
    assert!(outcome.stdout.trim_end().ends_with(a), "{}", outcome.stdout);
    let inspected: Value = serde_json::from_str(&call(&["inspect", REPO, "--json"]).success()).unwrap();
    assert_eq!((inspected["tensors"].as_u64(), inspected["files"].as_array().unwrap().len()), (Some(2), 2));

    let pulled: Value = serde_json::from_str(&call(&["pull", &named("Q8_0"), "--json"]).success()).unwrap();
    assert_eq!(pulled["model"], named("Q8_0"));
    let list = call(&["list"]).success();
    assert_eq!(list.lines().count(), 2, "{list}");
    assert!(list.contains(&named("Q8_0")) && list.contains(&named("UD-Q4_K_XL")), "{list}");
    let listed: Value = serde_json::from_str(&call(&["list", "--json"]).success()).unwrap();
    assert_eq!(listed["models"].as_array().unwrap().len(), 2);
    // What is not here is told with what is.
    let error = call(&["run", &named("IQ2_M"), "-p", "x"]).failure(1);
    assert!(error.contains("not downloaded") && error.contains("forebay pull"), "{error}");

    // A part that was removed by hand.
    fs::remove_file(repo_folder(home.path()).join("snapshots").join(COMMIT).join(b)).unwrap();
    let error = call(&["run", &named("UD-Q4_K_XL"), "-p", "x"]).failure(1);
    assert!(error.contains("1 of the 2 files") && error.contains("forebay pull"), "{error}");
    assert!(call(&["list"]).success().contains("1 of 2 files are missing"));
    call(&["pull", &named("UD-Q4_K_XL")]).success();

    assert_eq!(call(&["rm", &named("UD-Q4_K_XL")]).code, Some(2), "nobody can be asked");
    assert!(call(&["rm", &named("UD-Q4_K_XL"), "--yes"]).success().starts_with("removed"));
    assert_eq!(blobs(home.path()), [sha256(&model())]);
    call(&["inspect", &named("Q8_0")]).success();
    let error = call(&["rm", &named("UD-Q4_K_XL"), "--yes"]).failure(1);
    assert!(error.contains("forebay list"), "{error}");
    call(&["rm", REPO, "--yes"]).success();
    assert!(!repo_folder(home.path()).exists());
    let empty = call(&["list"]);
    assert!(empty.code == Some(0) && empty.stdout.is_empty() && empty.stderr.contains("forebay pull"));
}

#[test]
fn a_folder_of_safetensors_is_downloaded_without_duplicates() {
    let folder = PathBuf::from(golden("qwen3moe"));
    let mut files: Vec<(String, Vec<u8>)> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect();
    for other in ["pytorch_model.bin", "original/model.safetensors", "consolidated.pth", "README.md"] {
        files.push((other.to_owned(), b"other".to_vec()));
    }
    let config = files.iter().find(|(name, _)| name == "config.json").unwrap().1.clone();
    let (hub, home) =
        (Hub::new(files.iter().map(|(n, b)| (n.as_str(), b.clone())).collect()), tempdir().unwrap());
    // Before it is downloaded it can be looked at.
    let remote = hub.call(home.path(), &["inspect", REPO]).success();
    let plan = hub.call(home.path(), &["plan", REPO]).success();
    assert!(plan.contains("is not downloaded: `forebay pull"), "{plan}");
    assert!(!home.path().join("hub").exists(), "nothing is kept");

    let path = hub.call(home.path(), &["pull", REPO]).success();
    let path = Path::new(path.trim_end());
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    let mut expected: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    expected.sort();
    assert_eq!(names, expected);
    assert!(blobs(home.path()).contains(&git_sha1(&config)));
    assert_eq!(lasting(&hub.call(home.path(), &["inspect", REPO]).success()), lasting(&remote));
    assert_eq!(lasting(&hub.call(home.path(), &["inspect", &text(&folder)]).success()), lasting(&remote));
    assert_eq!(hub.call(home.path(), &["run", REPO, "-p", "x", "--raw", "-n", "2"]).code, Some(0));
}

#[test]
fn a_model_is_planned_and_inspected_by_its_header_before_it_is_downloaded() {
    let bytes = fs::read(demo_model()).unwrap();
    let (hub, home) = (Hub::new(vec![(FILE, bytes.clone())]), tempdir().unwrap());
    // The first piece is cut, and asked for again.
    hub.fail(&[Fault::Cut(1000)]);
    let inspected = hub.call(home.path(), &["inspect", REPO]).success();
    let here = hub.call(home.path(), &["inspect", &demo_model()]).success();
    assert_eq!(lasting(&inspected), lasting(&here));
    let sent: usize = hub.requests("/large/").iter().map(|r| r.sent).sum();
    assert!(sent < bytes.len() / 2, "{sent} of {} bytes were read", bytes.len());
    assert!(hub.requests("/large/").iter().all(|r| r.range.is_some()));

    let plan = hub.call(home.path(), &["plan", &named("Q4_K_M"), "--memory", "2G"]).success();
    assert!(
        plan.starts_with(&format!("{} is not downloaded: `forebay pull {0}` downloads", named("Q4_K_M"))),
        "{plan}"
    );
    let here =
        hub.call(home.path(), &["plan", &demo_model(), "--memory", "2G", "--no-probe", "--json"]).success();
    let there = hub.call(home.path(), &["plan", REPO, "--memory", "2G", "--json"]).success();
    let experts = |json: &str| serde_json::from_str::<Value>(json).unwrap()["experts"].clone();
    assert_eq!(experts(&there), experts(&here));
    let json = hub.call(home.path(), &["inspect", REPO, "--json"]).success();
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["files"][0], format!("{REPO}/{FILE}"));
    assert!(!home.path().join("hub").exists(), "nothing is kept");

    let offline = hub.command(home.path(), &["plan", REPO]).env("HF_HUB_OFFLINE", "1").output().unwrap();
    let error = Outcome::from(offline).failure(1);
    assert!(error.contains("HF_HUB_OFFLINE") && error.contains("forebay pull"), "{error}");
}

#[cfg(unix)]
#[test]
fn downloads_of_other_tools_are_found() {
    let (hub, home, bytes) = one_model();
    let folder = repo_folder(home.path());
    // An older version that no branch names any more.
    let snapshot = folder.join("snapshots").join("ffff456789abcdef0123456789abcdef01234567");
    for new in [folder.join("blobs"), snapshot.clone()] {
        fs::create_dir_all(new).unwrap();
    }
    fs::write(folder.join("blobs").join(sha256(&bytes)), &bytes).unwrap();
    std::os::unix::fs::symlink(Path::new("../../blobs").join(sha256(&bytes)), snapshot.join(FILE)).unwrap();
    hub.call(home.path(), &["inspect", &named("Q4_K_M")]).success();
    assert!(hub.requests("/").is_empty());
    // The present version has the same file: it only gets its name there.
    hub.call(home.path(), &["pull", REPO]).success();
    assert!(hub.requests("/large/").is_empty());
    hub.call(home.path(), &["rm", &named("Q4_K_M"), "--yes"]).success();
    assert!(!folder.exists());
}

#[test]
fn a_path_that_exists_is_a_path_and_others_are_told_apart() {
    let (hub, home, _) = one_model();
    let folder = tempdir().unwrap();
    fs::create_dir(folder.path().join("someone")).unwrap();
    fs::copy(golden("qwen3moe.gguf"), folder.path().join(REPO)).unwrap();
    let here = hub.command(home.path(), &["inspect", REPO]).current_dir(folder.path()).output().unwrap();
    Outcome::from(here).success();
    assert!(hub.requests("/").is_empty());
    let error = hub.call(home.path(), &["run", "nobody/nothing", "-p", "x"]).failure(1);
    assert!(
        error
            == "nobody/nothing is not a file here and is not downloaded; `forebay pull nobody/nothing` downloads it",
        "{error}"
    );
    let error = hub.call(home.path(), &["inspect", "folder/model.gguf"]).failure(1);
    assert!(error.contains("folder/model.gguf: cannot open"), "{error}");
    assert_eq!(hub.call(home.path(), &["pull", "model.gguf"]).code, Some(2));
}

#[test]
fn addresses_are_models_wherever_names_are() {
    let (hub, home, bytes) = one_model();
    let call = |args: &[&str]| hub.call(home.path(), args);
    let address = format!("https://huggingface.co/{REPO}/blob/main/{FILE}");
    let path = call(&["pull", &address]).success();
    assert_eq!(fs::read(path.trim_end()).unwrap(), bytes);
    let page = format!("https://huggingface.co/{REPO}");
    for name in [&address, &page, &format!("hf.co/{REPO}:Q4_K_M"), &format!("{address}?download=true")] {
        call(&["inspect", name]).success();
        assert!(call(&["tokenize", "-m", name, "--text", "Hi"]).success().lines().count() > 0);
    }
    let error = call(&["run", "https://huggingface.co/datasets/a/b", "-p", "x"]).failure(1);
    assert!(error.contains("expected OWNER/NAME, OWNER/NAME:QUANT or the address of a model"), "{error}");
}

#[test]
fn a_word_that_is_no_model_is_told_what_models_are_called() {
    let (hub, home, _) = one_model();
    let call = |args: &[&str]| hub.call(home.path(), args);
    let error = call(&["run", "some-model:8b", "-p", "x"]).failure(1);
    assert_eq!(
        error,
        "there is no file \"some-model:8b\"; models of the hub have names such as OWNER/NAME:Q4_K_M: `forebay pull` \
         downloads a model, `forebay list` shows the downloaded models"
    );
    call(&["pull", REPO]).success();
    let similar = format!("Downloaded under a similar name: {}", named("Q4_K_M"));
    for word in ["some-model:8b", "SomeModel"] {
        let error = call(&["run", word, "-p", "x"]).failure(1);
        assert!(error.ends_with(&similar), "{error}");
    }
    let error = call(&["run", "other", "-p", "x"]).failure(1);
    assert!(!error.contains("similar"), "{error}");
    let error = call(&["inspect", "Tell me a story"]).failure(1);
    assert!(error.ends_with("A prompt goes after the model or after -p"), "{error}");
}

/// The terminal is tmux's.
#[cfg(unix)]
#[test]
fn on_a_terminal_a_model_that_is_not_here_is_offered() {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use forebay_testing::{Need, skipped};

    if Command::new("tmux").arg("-V").output().is_err() {
        return skipped(Need::Tmux, "there is no tmux here");
    }
    let (hub, home, bytes) = one_model();
    for (answer, end) in [("n", "ended with 1"), ("y", "ended with 0")] {
        let socket = format!("forebay-offer-{answer}-{}", std::process::id());
        let tmux = |args: &[&str]| {
            let output = Command::new("tmux").args(["-L", &socket]).args(args).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        let wait_for = |text: &str| {
            let start = Instant::now();
            loop {
                let screen = tmux(&["capture-pane", "-p", "-J", "-S", "-"]);
                if screen.contains(text) {
                    return screen;
                }
                assert!(start.elapsed() < Duration::from_secs(60), "no {text:?} in:\n{screen}");
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        let call = format!(
            "HF_ENDPOINT={} HF_HOME={} XDG_CONFIG_HOME=/nonexistent {} run {} --raw -p x -n 2; echo \"ended with $?\"; \
             sleep 60",
            hub.address,
            home.path().display(),
            env!("CARGO_BIN_EXE_forebay"),
            named("Q4_K_M")
        );
        tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "160", "-y", "50", &call]);
        wait_for(&format!("Download {} (582.7 KiB) now? [y/N]", named("Q4_K_M")));
        assert_eq!(blobs(home.path()), [""; 0]);
        tmux(&["send-keys", answer, "Enter"]);
        let screen = wait_for(end);
        assert_eq!(screen.contains("downloads it"), answer == "n", "{screen}");
        tmux(&["kill-server"]);
    }
    assert_eq!(blobs(home.path()), [sha256(&bytes)]);
}

#[test]
fn names_that_lead_elsewhere_are_refused() {
    for name in ["../../evil.gguf", "/etc/evil.gguf", "a/../../evil.gguf"] {
        let (hub, home) = (Hub::new(vec![(name, model())]), tempdir().unwrap());
        let error = hub.call(home.path(), &["pull", REPO]).failure(1);
        assert!(error.contains("leads out of the repository"), "{error}");
        assert!(!home.path().join("hub").exists());
    }
}
