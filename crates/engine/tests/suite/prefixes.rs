//! The prefix cache: conversations are found by their tokens, in memory and on disk, and continue with the same bits as
//! if they had never been kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_engine::chat::{Message, RenderOptions};
use forebay_engine::tokenizer::{Bos, EncodeOptions};
use forebay_engine::{
    Answer, Cancel, Client, Crowd, CrowdOptions, Engine, FinishReason, Precision, PrefixOptions, Stats,
    Tenant, TokenId,
};

use crate::common::models::{KEEPING, containers, options, random_tokens, trained};
use crate::common::served::{Ear, add, alone, ask, assert_same, finish, request};

fn open(family: &str) -> Engine {
    let [file, _] = containers(family);
    Engine::open(&file, &options(Precision::Fast).chunk(64)).unwrap()
}

/// Options with plenty of memory and disk.
fn keeping(folder: Option<&Path>) -> PrefixOptions {
    PrefixOptions { memory: 1 << 40, folder: folder.map(Path::to_owned), disk: 1 << 40, gain: 8 }
}

fn crowd(engine: &Engine, prefixes: PrefixOptions) -> Crowd {
    Crowd::new(engine, CrowdOptions { prefixes: Some(prefixes), ..CrowdOptions::new(4) })
}

/// The cache's files with this ending.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
    found
}

#[test]
fn twenty_turns_compute_only_what_is_new() {
    for family in KEEPING {
        let engine = open(family);
        let mut crowd = crowd(&engine, keeping(None));
        let mut history = random_tokens(30, 160, 1);
        let mut known = 0;
        for turn in 0..20 {
            let question = random_tokens(2 + turn % 4, 160, 100 + turn as u64);
            let request = request(&[&history[..], &question].concat(), 6, turn as u64);
            let answer = ask(&mut crowd, &request);
            assert_same(&answer, &alone(&engine, &request), &format!("{family}, turn {turn}"));
            assert_eq!(answer.stats.reused_tokens, known, "{family}, turn {turn}");
            history = [&request.prompt[..], &answer.tokens].concat();
            // The last token of an answer is chosen but not computed.
            known = history.len() - 1;
        }
        let meters = crowd.prefix_meters();
        assert_eq!((meters.entries, meters.hits, meters.misses), (1, 19, 1), "{family}");
    }
}

/// The next prompt lacks the reasoning, so it differs from the kept conversation where the last answer began.
#[test]
fn an_answer_that_comes_back_in_other_words_costs_no_more_than_itself() {
    for family in KEEPING {
        let engine = open(family);
        let mut crowd = crowd(&engine, keeping(None));
        let mut history = random_tokens(70, 160, 2);
        for turn in 0..12 {
            let request = request(&history, 9, turn);
            let answer = ask(&mut crowd, &request);
            let known = if turn == 0 { 0 } else { history.len() - 7 };
            assert_eq!(answer.stats.reused_tokens, known, "{family}, turn {turn}");
            assert_same(&answer, &alone(&engine, &request), &format!("{family}, turn {turn}"));
            // Three tokens of the answer, after a token that it did not begin with, and a question.
            let other = TokenId((answer.tokens[0].0 + 1) % 160);
            history.extend([other].iter().chain(&answer.tokens[6..]).chain(&random_tokens(
                3,
                160,
                50 + turn,
            )));
        }
    }
}

#[test]
fn conversations_share_their_system_prompt() {
    // To the tokenizer of the tiny Gemma 4, some of the random tokens begin turns.
    for family in KEEPING.into_iter().filter(|&family| family != "gemma4") {
        let engine = open(family);
        let mut crowd = crowd(&engine, keeping(None));
        let system = random_tokens(200, 160, 3);
        let reused: Vec<usize> = (0..4)
            .map(|i| {
                let first = [TokenId(i as u32 + 1)];
                let request = request(&[&system[..], &first, &random_tokens(20, 160, 60 + i)].concat(), 5, i);
                let answer = ask(&mut crowd, &request);
                assert_same(&answer, &alone(&engine, &request), family);
                answer.stats.reused_tokens
            })
            .collect();
        assert_eq!(crowd.prefix_meters().entries, 4, "{family}: all are kept");
        // Layers that can be rewound only to marks have a mark at the common beginning after the second prompt.
        let second = if matches!(family, "qwen35moe" | "gpt_oss" | "lfm2_moe") { reused[1] } else { 200 };
        assert_eq!(reused, [0, second, 200, 200], "{family}");
        if family == "qwen3moe" {
            let [one, all] = [1, 4].map(|n| n * 300 * engine.traffic().position);
            let bytes = crowd.prefix_meters().bytes;
            assert!(bytes >= one && bytes < all, "{bytes} bytes; alone one has {one}");
        }
    }
}

/// The end of a system prompt is recognised by its tokens, so that the second conversation can share it.
#[test]
fn a_system_prompt_that_ends_with_a_control_token_is_shared_at_once() {
    let Some(model) = trained("tales-qwen35moe-Q4_K_M.gguf") else { return };
    let engine = Engine::open(&model, &options(Precision::Fast)).unwrap();
    let template = engine.template().unwrap().unwrap();
    let render = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let mut crowd = crowd(&engine, keeping(None));
    let system = "You tell stories about a little bear, and nobody else. ".repeat(20);
    for (turn, who) in ["cat", "dog", "king"].into_iter().enumerate() {
        let question = format!("{who}s: what does the bear think of them?");
        let messages = [Message::new("system", system.clone()), Message::new("user", question)];
        let text = template.render(&messages, &render).unwrap();
        let options = EncodeOptions { special: true, bos: Bos::Never };
        let request = request(&engine.tokenizer().encode(&text, options).unwrap(), 10, 1);
        let answer = ask(&mut crowd, &request);
        assert_same(&answer, &alone(&engine, &request), who);
        let Stats { reused_tokens, prompt_tokens, .. } = answer.stats;
        assert!(turn == 0 || reused_tokens + 40 >= prompt_tokens, "{reused_tokens} of {prompt_tokens}");
    }
    assert_eq!(crowd.prefix_meters().entries, 3);
}

#[test]
fn a_cancelled_answer_is_kept_too() {
    let engine = open("qwen35moe");
    let mut crowd = crowd(&engine, keeping(None));
    let prompt = random_tokens(100, 160, 4);
    let (cancel, ear) = (Cancel::default(), Ear::default());
    crowd.add(request(&prompt, 50, 1), cancel.clone(), Box::new(ear.clone()));
    for _ in 0..5 {
        crowd.step(&Cancel::default()).unwrap();
    }
    cancel.cancel();
    finish(&mut crowd);
    assert_eq!(ear.answer().finish_reason, FinishReason::Cancelled);
    let again = request(&[&prompt[..], &random_tokens(3, 160, 5)].concat(), 5, 2);
    let answer = ask(&mut crowd, &again);
    assert_eq!(answer.stats.reused_tokens, 100);
    assert_same(&answer, &alone(&engine, &again), "after a cancelled answer");
}

#[test]
fn a_restart_goes_on_from_disk() {
    for family in KEEPING {
        let folder = tempfile::tempdir().unwrap();
        let first = request(&random_tokens(150, 160, 6), 20, 1);
        let answer = {
            let engine = open(family);
            let mut crowd = crowd(&engine, keeping(Some(folder.path())));
            let answer = ask(&mut crowd, &first);
            crowd.save_prefixes();
            answer
        };
        let history = [&first.prompt[..], &answer.tokens].concat();
        let next = request(&[&history[..], &random_tokens(5, 160, 7)].concat(), 10, 2);
        let other = request(&[&first.prompt[..], &random_tokens(9, 160, 8)].concat(), 10, 3);

        let engine = open(family);
        let mut crowd = crowd(&engine, keeping(Some(folder.path())));
        let meters = crowd.prefix_meters();
        assert_eq!((meters.entries, meters.disk_entries), (0, 1), "{family}");
        assert!(meters.disk_bytes > 0);
        // Both at once: the file is read for only one of them.
        let ears = [&next, &other].map(|request| add(&mut crowd, request));
        finish(&mut crowd);
        let [went_on, parted] = ears.map(|ear| ear.answer());
        assert_eq!(went_on.stats.reused_tokens, history.len() - 1, "{family}");
        assert_same(&went_on, &alone(&engine, &next), family);
        assert!(parted.stats.reused_tokens >= 140, "{family}: {}", parted.stats.reused_tokens);
        assert_same(&parted, &alone(&engine, &other), family);
        let meters = crowd.prefix_meters();
        assert!(meters.loads >= 1 && meters.failures == 0, "{family}: {meters:?}");

        // A longer conversation replaces the shorter one.
        crowd.save_prefixes();
        drop(crowd);
        let engine = open(family);
        let crowd = self::crowd(&engine, keeping(Some(folder.path())));
        assert_eq!(crowd.prefix_meters().disk_entries, 2, "{family}");
        assert_eq!(files(folder.path(), ".conversation").len(), 2, "{family}");
    }
}

#[test]
fn a_file_that_saves_little_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let first = request(&random_tokens(100, 160, 9), 5, 1);
    let mut before = crowd(&engine, keeping(Some(folder.path())));
    ask(&mut before, &first);
    before.save_prefixes();
    drop(before);
    let mut crowd = crowd(&engine, PrefixOptions { gain: 101, ..keeping(Some(folder.path())) });
    let answer = ask(&mut crowd, &first);
    assert_eq!((answer.stats.reused_tokens, crowd.prefix_meters().loads), (0, 0));
}

#[test]
fn limits_hold_and_the_oldest_leave() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let ask_all = |crowd: &mut Crowd, seeds: std::ops::Range<u64>| {
        for seed in seeds {
            ask(crowd, &request(&random_tokens(130, 160, seed), 5, 1));
        }
    };
    let mut one = crowd(&engine, keeping(None));
    ask_all(&mut one, 70..71);
    let bytes = one.prefix_meters().bytes;
    drop(one);

    let prefixes =
        PrefixOptions { memory: 2 * bytes + bytes / 2, disk: 4 * bytes, ..keeping(Some(folder.path())) };
    let mut crowd = crowd(&engine, prefixes);
    for seed in 70..80 {
        ask_all(&mut crowd, seed..seed + 1);
        let meters = crowd.prefix_meters();
        assert!(meters.bytes <= 2 * bytes + bytes / 2 && meters.disk_bytes <= 4 * bytes, "{meters:?}");
        // Writing takes a while. If it took too long, some conversations would not be written.
        let start = Instant::now();
        while crowd.prefix_meters().writes < meters.evictions {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is written");
            std::thread::sleep(Duration::from_millis(1));
            crowd.step(&Cancel::default()).unwrap();
        }
    }
    let meters = crowd.prefix_meters();
    assert_eq!((meters.entries, meters.evictions, meters.writes), (2, 8, 8), "{meters:?}");
    assert!(meters.disk_entries >= 2, "{meters:?}");
    // The newest are kept, the oldest are not.
    let known = |crowd: &mut Crowd, seed| {
        ask(crowd, &request(&random_tokens(130, 160, seed), 5, 1)).stats.reused_tokens
    };
    assert_eq!([79, 78, 70].map(|seed| known(&mut crowd, seed)), [129, 129, 0]);
    crowd.save_prefixes();
    drop(crowd);
    let on_disk: u64 =
        files(folder.path(), ".conversation").iter().map(|f| f.metadata().unwrap().len()).sum();
    assert!(on_disk <= 4 * bytes, "{on_disk} bytes, and {} were allowed", 4 * bytes);
}

#[test]
fn the_limit_holds_for_all_models_together() {
    let folder = tempfile::tempdir().unwrap();
    let keep = |family: &str, disk, seeds: std::ops::Range<u64>| {
        let mut crowd = crowd(&open(family), PrefixOptions { disk, ..keeping(Some(folder.path())) });
        for seed in seeds {
            ask(&mut crowd, &request(&random_tokens(130, 160, seed), 5, 1));
        }
        crowd.save_prefixes();
    };
    let sizes = || -> Vec<u64> {
        files(folder.path(), ".conversation").iter().map(|file| file.metadata().unwrap().len()).collect()
    };
    keep("qwen3moe", 1 << 40, 70..74);
    let before: u64 = sizes().iter().sum();
    assert_eq!(sizes().len(), 4);
    // Another model's conversations replace the oldest ones.
    keep("qwen35moe", before, 80..82);
    let (sizes, models) = (sizes(), fs::read_dir(folder.path()).unwrap().count());
    assert!(sizes.iter().sum::<u64>() <= before, "{sizes:?}, and {before} were allowed");
    assert!(models == 2 && sizes.len() >= 2, "{sizes:?}");
    let newest = crowd(&open("qwen35moe"), keeping(Some(folder.path()))).prefix_meters();
    assert_eq!(newest.disk_entries, 2, "the newest stay");
}

#[test]
fn tenants_share_nothing_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let of = |tenant| {
        request(&random_tokens(100, 160, 16), 5, 1).client(Client { tenant: Tenant(tenant), number: tenant })
    };
    let mut before = crowd(&engine, keeping(Some(folder.path())));
    ask(&mut before, &of(1));
    before.save_prefixes();
    drop(before);
    let mut crowd = crowd(&engine, keeping(Some(folder.path())));
    assert_eq!([2, 0, 1].map(|tenant| ask(&mut crowd, &of(tenant)).stats.reused_tokens), [0, 0, 99]);
    crowd.save_prefixes();
    drop(crowd);
    assert_eq!(files(folder.path(), ".conversation").len(), 3, "each has its own");
}

#[cfg(unix)]
#[test]
fn conversations_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("prefixes");
    let save = |family: &str| {
        let mut crowd = crowd(&open(family), keeping(Some(&folder)));
        ask(&mut crowd, &request(&random_tokens(100, 160, 17), 5, 1));
        crowd.save_prefixes();
    };
    let all = || -> Vec<PathBuf> {
        let folders = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        files(&folder, "").into_iter().chain(folders).chain([folder.clone()]).collect()
    };
    let check = || {
        for path in all() {
            let expected = if path.is_dir() { 0o700 } else { 0o600 };
            let mode = path.metadata().unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, expected, "{}: {mode:o}", path.display());
        }
    };
    save("qwen3moe");
    save("qwen35moe");
    assert_eq!(all().len(), 7, "two files, two locks, their folders and the one of both");
    check();
    // Older files of this model and of another one, and a file whose name has no tenant.
    let [file, _] = &files(&folder, ".conversation")[..] else { panic!("there are two files") };
    let nobodys = file.with_file_name("0123456789abcdef.conversation");
    fs::copy(file, &nobodys).unwrap();
    for path in all() {
        let mode = if path.is_dir() { 0o755 } else { 0o644 };
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let meters =
        ["qwen3moe", "qwen35moe"].map(|family| crowd(&open(family), keeping(Some(&folder))).prefix_meters());
    assert_eq!(meters.map(|meters| (meters.disk_entries, meters.failures)), [(1, 0), (1, 0)]);
    assert!(!nobodys.exists());
    check();
    // A conversation that the user saves.
    let path = cache.path().join("saved");
    let mut session = open("qwen3moe").session();
    session.extend(&random_tokens(10, 160, 18)).unwrap();
    session.save(&path).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_disk_that_cannot_be_written_costs_nothing_but_the_cache() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let mut crowd = crowd(&engine, keeping(Some(folder.path())));
    for entry in fs::read_dir(folder.path()).unwrap() {
        fs::remove_dir_all(entry.unwrap().path()).unwrap();
    }
    let request = request(&random_tokens(100, 160, 10), 5, 1);
    let answer = ask(&mut crowd, &request);
    crowd.save_prefixes();
    let start = Instant::now();
    while crowd.prefix_meters().failures == 0 {
        assert!(start.elapsed() < Duration::from_secs(30));
        crowd.save_prefixes();
        std::thread::sleep(Duration::from_millis(5));
    }
    let again = ask(&mut crowd, &request);
    assert_same(&again, &answer, "after a write that failed");
    assert_eq!(again.stats.reused_tokens, 99, "memory serves");
    // A folder that cannot be created, and one that another crowd uses.
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let _owner = self::crowd(&engine, keeping(Some(elsewhere.path())));
    for folder in [&file, elsewhere.path()] {
        let mut crowd = self::crowd(&engine, keeping(Some(folder)));
        assert_same(&ask(&mut crowd, &request), &answer, "without a folder");
        crowd.save_prefixes();
        assert_eq!(crowd.prefix_meters().disk_entries, 0);
    }
}

#[test]
fn damaged_and_foreign_files_are_removed_and_never_believed() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen35moe");
    let prompt = random_tokens(100, 160, 11);
    let request = self::request(&[&prompt[..], &random_tokens(3, 160, 12)].concat(), 5, 2);
    let expected = alone(&engine, &request);
    let save = |engine: &Engine, folder: &Path| {
        let mut crowd = crowd(engine, keeping(Some(folder)));
        ask(&mut crowd, &self::request(&prompt, 5, 1));
        crowd.save_prefixes();
    };
    save(&engine, folder.path());
    let [path] = &files(folder.path(), ".conversation")[..] else { panic!("there is one file") };
    let whole = fs::read(path).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    save(&open("qwen3moe"), elsewhere.path());
    let foreign = fs::read(&files(elsewhere.path(), ".conversation")[0]).unwrap();

    let try_with = |bytes: &[u8], what: &str| {
        fs::write(path, bytes).unwrap();
        fs::write(path.with_extension("conversation.4711"), &whole[..whole.len() / 2]).unwrap();
        let mut crowd = crowd(&engine, keeping(Some(folder.path())));
        assert!(files(folder.path(), ".4711").is_empty(), "{what}: what a write left is gone");
        assert_same(&ask(&mut crowd, &request), &expected, what);
        let meters = crowd.prefix_meters();
        assert_eq!((meters.loads, meters.failures, meters.disk_entries), (0, 1, 0), "{what}: {meters:?}");
        assert!(!path.exists(), "{what}: it is gone");
    };
    try_with(b"", "nothing");
    try_with(b"Once upon a time there was a file that is no conversation.", "a text");
    try_with(&foreign, "another model's");
    let places = (0..64).chain((64..whole.len()).step_by(whole.len() / 40)).chain([whole.len() - 1]);
    for at in places {
        try_with(&whole[..at], &format!("cut at {at}"));
    }
    for at in [whole.len() / 3, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[at] ^= 1;
        try_with(&damaged, &format!("byte {at} changed"));
    }
    fs::write(path, &whole).unwrap();
    let mut crowd = crowd(&engine, keeping(Some(folder.path())));
    let answer = ask(&mut crowd, &request);
    assert_same(&answer, &expected, "the whole file");
    assert_eq!(answer.stats.reused_tokens, 100);
}

/// One request waits for a file, and another for that request's prompt. Then the file turns out to be unusable.
#[test]
fn who_loses_the_file_it_waited_for_does_not_wait_for_its_own_follower() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let known = random_tokens(100, 160, 13);
    let mut before = crowd(&engine, keeping(Some(folder.path())));
    ask(&mut before, &request(&known, 1, 1));
    before.save_prefixes();
    drop(before);
    let mut crowd = crowd(&engine, keeping(Some(folder.path())));
    let [path] = &files(folder.path(), ".conversation")[..] else { panic!("there is one file") };
    fs::write(path, "no conversation").unwrap();
    let request = request(&[&known[..], &random_tokens(100, 160, 14)].concat(), 5, 2);
    let ears = [add(&mut crowd, &request), add(&mut crowd, &request)];
    finish(&mut crowd);
    let expected = alone(&engine, &request);
    let answers = ears.map(|ear| ear.answer());
    answers.iter().for_each(|answer| assert_same(answer, &expected, "without the file"));
    assert_eq!(answers.map(|answer| answer.stats.reused_tokens), [0, 199]);
    assert_eq!(crowd.prefix_meters().failures, 1);
}

/// A pipe instead of the file: reading it blocks until the test writes to it.
#[cfg(unix)]
#[test]
fn while_all_wait_for_a_file_steps_rest() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let request = request(&random_tokens(100, 160, 15), 5, 1);
    let mut before = crowd(&engine, keeping(Some(folder.path())));
    ask(&mut before, &request);
    before.save_prefixes();
    drop(before);
    let mut crowd = crowd(&engine, keeping(Some(folder.path())));
    let [path] = &files(folder.path(), ".conversation")[..] else { panic!("there is one file") };
    fs::remove_file(path).unwrap();
    assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    let ear = add(&mut crowd, &request);
    let start = Instant::now();
    let written: Vec<usize> = (0..5).map(|_| crowd.step(&Cancel::default()).unwrap()).collect();
    let (rested, idle) = (start.elapsed(), crowd.idle_steps());
    // Written before any assertion, because dropping the crowd waits for the file.
    drop(fs::OpenOptions::new().write(true).open(path).unwrap());
    assert_eq!((written, idle), (vec![0; 5], 5));
    // A lower bound: each idle step waits 20 ms, on any machine.
    assert!(rested >= Duration::from_millis(100), "{rested:?}");
    finish(&mut crowd);
    assert_same(&ear.answer(), &alone(&engine, &request), "after all");
}

const FOLDER: &str = "FOREBAY_TEST_PREFIXES";

/// A process that writes conversations is killed at many moments. The next one finds complete files or none.
#[test]
fn killing_a_writer_leaves_a_clean_start() {
    let folder = tempfile::tempdir().unwrap();
    let engine = open("qwen3moe");
    let expected: Vec<Answer> = (0..WRITTEN).map(|i| alone(&engine, &written(i))).collect();
    let mut found = 0;
    for round in 0..6 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["prefixes::writes_until_it_is_killed", "--exact"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let start = Instant::now();
        while files(folder.path(), ".conversation").len() < 2 {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing is written");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(round * 3));
        child.kill().unwrap();
        child.wait().unwrap();

        let mut crowd = crowd(&engine, keeping(Some(folder.path())));
        let (all, whole) = (files(folder.path(), ""), files(folder.path(), ".conversation"));
        assert_eq!(all.len(), whole.len() + 1, "conversations and the lock: {all:?}");
        for (i, expected) in expected.iter().enumerate() {
            assert_same(&ask(&mut crowd, &written(i)), expected, &format!("round {round}"));
        }
        let meters = crowd.prefix_meters();
        assert_eq!(meters.failures, 0, "{meters:?}");
        found += meters.loads;
        drop(crowd);
        whole.iter().for_each(|file| drop(fs::remove_file(file)));
    }
    assert!(found >= 6, "{found} conversations were read");
}

const WRITTEN: usize = 6;

fn written(i: usize) -> forebay_engine::Request {
    request(&random_tokens(200, 160, 80 + i as u64), 2, 1)
}

/// The child process of the test above.
#[test]
fn writes_until_it_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER) else { return };
    let engine = open("qwen3moe");
    for generation in 0.. {
        // No memory for the cache: each conversation is written at once.
        let prefixes = PrefixOptions { memory: 0, ..keeping(Some(Path::new(&folder))) };
        let mut crowd = crowd(&engine, prefixes);
        for i in 0..WRITTEN {
            let mut request = written(i);
            request.max_tokens = Some(2 + generation % 40);
            ask(&mut crowd, &request);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
