//! `forebay serve`: clients that leave, too many of them, signals, and drives that fail.

#![cfg(unix)]

use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common;
use crate::common::server::{Response, Server, question};

const CHAT: &str = "/v1/chat/completions";

/// A server whose answers take their time.
const SLOW: [&str; 3] = ["--exact", "--threads", "1"];

/// How soon something that was asked to end has ended, on a machine that has much else to do.
const SOON: Duration = Duration::from_secs(30);

/// An answer of about 900 tokens, whatever the model would like.
fn endless(server: &Server) -> Value {
    let ends = server.post("/tokenize", &json!({ "content": "<|im_end|><|endoftext|>" })).ok();
    let bias = ends["tokens"].as_array().unwrap().iter().map(|id| (id.to_string(), json!(-100)));
    let bias: serde_json::Map<_, _> = bias.collect();
    json!({ "messages": question("Tell me a story."), "max_tokens": 900, "logit_bias": bias, "temperature": 0 })
}

#[test]
fn a_client_that_leaves_ends_its_answer_and_no_other() {
    let server = Server::start(&SLOW[..1]);
    let body = endless(&server);
    let mut other = body.clone();
    other["max_tokens"] = 60.into();
    let alone = server.post(CHAT, &other).ok()["choices"][0]["message"]["content"].clone();
    let mut leaves = server.stream(CHAT, &body);
    for _ in 0..3 {
        leaves.next().unwrap();
    }
    let whole = server.send("POST", CHAT, &[], body.to_string().as_bytes());
    server.wait_for_metric("forebay_requests_running", 2.0, SOON);
    let mut stays = server.stream(CHAT, &other);
    stays.next().unwrap();
    drop(leaves);
    drop(whole);
    let mut text = String::new();
    while let Some(data) = stays.next().filter(|data| data != "[DONE]") {
        let chunk: Value = serde_json::from_str(&data).unwrap();
        text.push_str(chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert_eq!(alone, text);
    server.wait_for_metric("forebay_answers_cancelled_total", 2.0, SOON);
    server.wait_for_metric("forebay_requests_open", 0.0, SOON);
}

#[test]
fn more_than_the_queue_takes_are_refused_and_come_back() {
    let server = Server::start(&[&SLOW[..], &["--parallel", "1", "--queue", "1"]].concat());
    let body = endless(&server);
    let first = server.stream(CHAT, &body);
    let second = server.stream(CHAT, &body);
    server.wait_for_metric("forebay_requests_open", 2.0, SOON);
    let third = server.post(CHAT, &body);
    assert_eq!(third.status, 429, "{}", third.text());
    assert!(third.header("retry-after").unwrap().parse::<u64>().unwrap() > 0);
    assert_eq!(third.header("x-should-retry"), None);
    assert_eq!(third.json()["error"]["code"], "rate_limit_exceeded");
    drop(first);
    drop(second);
    server.wait_for_metric("forebay_answers_cancelled_total", 2.0, SOON);
    server.wait_for_metric("forebay_requests_open", 0.0, SOON);
    server.post(CHAT, &json!({ "messages": question("Hello"), "max_tokens": 1 })).ok();
}

#[test]
fn an_answer_that_takes_too_long_is_ended() {
    let server = Server::start(&[&SLOW[..], &["--timeout", "2"]].concat());
    let body = endless(&server);
    let whole = server.post(CHAT, &body);
    assert_eq!((whole.status, &whole.json()["error"]["code"]), (504, &json!("timeout")));
    let chunks = server.stream(CHAT, &body).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["code"], "timeout");
    assert!(chunks.len() > 3);
    server.wait_for_metric("forebay_requests_open", 0.0, SOON);
}

#[test]
fn the_first_signal_waits_for_answers_and_takes_no_more() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&["--exact"]);
        let mut body = endless(&server);
        body["max_tokens"] = 400.into();
        let mut stream = server.stream(CHAT, &body);
        stream.next().unwrap();
        server.signal(signal);
        let start = Instant::now();
        while server.get("/ready").status != 503 {
            assert!(start.elapsed() < SOON);
        }
        assert_eq!(server.get("/health").ok()["state"], "leaving");
        let late = server.post(CHAT, &body);
        assert_eq!(late.status, 503, "{}", late.text());
        assert!(late.header("retry-after").is_some());
        let chunks = stream.chunks();
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length");
        assert_eq!(server.wait(SOON), Some(0), "{signal}");
    }
}

#[test]
fn a_second_signal_leaves_at_once() {
    let mut server = Server::start(&SLOW);
    let mut stream = server.stream(CHAT, &endless(&server));
    stream.next().unwrap();
    server.signal("TERM");
    while !server.log().contains("Shutting down") {
        std::thread::sleep(Duration::from_millis(5));
    }
    server.signal("TERM");
    assert_eq!(server.wait(SOON), Some(130));
}

#[test]
fn answers_that_take_too_long_do_not_keep_the_server() {
    let mut server = Server::start(&[&SLOW[..], &["--drain", "1"]].concat());
    let body = endless(&server);
    let mut stream = server.stream(CHAT, &body);
    stream.next().unwrap();
    let whole = server.send("POST", CHAT, &[], body.to_string().as_bytes());
    // These two may end by themselves. So they begin last, and many others that do not end make them slow.
    let _others: Vec<_> =
        (0..12).map(|_| server.send("POST", CHAT, &[], body.to_string().as_bytes())).collect();
    server.wait_for_metric("forebay_requests_open", 14.0, SOON);
    let mut message =
        server.stream("/v1/messages", &json!({ "messages": body["messages"], "max_tokens": 900 }));
    let mut response = server.stream("/v1/responses", &json!({ "input": "Tell me a story." }));
    message.next().unwrap();
    response.next().unwrap();
    server.signal("TERM");
    // Those who wait are told why there is no more.
    let chunks = stream.chunks();
    let told = chunks.last().unwrap()["error"]["message"].as_str().unwrap();
    assert!(told.contains("shutting down"), "{told}");
    for told in [message.events(), response.events()] {
        assert!(told.last().unwrap().to_string().contains("shutting down"), "{:?}", told.last());
    }
    assert_eq!(Response::read(whole).status, 503);
    assert_eq!(server.wait(SOON), Some(0));
    assert!(server.log().contains("not complete after 1 seconds"), "{}", server.log());
}

#[test]
fn a_server_whose_log_nobody_reads_ends_all_the_same() {
    let mut command = common::forebay(["serve", "--port", "0", "--threads", "1", "--drain", "1"]);
    let mut child = command.spawn().unwrap();
    // Only what says where it listens is read, and the rest fills the pipe until whoever logs is stuck.
    let mut log = BufReader::with_capacity(1, child.stderr.take().unwrap());
    let mut first = String::new();
    log.read_line(&mut first).unwrap();
    let address = first.trim().strip_prefix("Listening at http://").unwrap().to_owned();
    let ask = || {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let path = "x".repeat(8000);
        let head = format!("GET /{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream.read(&mut [0; 12]).is_ok_and(|n| n > 0)
    };
    let start = Instant::now();
    while ask() {
        assert!(start.elapsed() < SOON, "the log takes everything");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > SOON * 2 {
            child.kill().unwrap();
            panic!("still running");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(log);
}

#[test]
fn a_drive_that_fails_is_told_and_recovers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::copy(common::demo_model(), &path).unwrap();
    let server = Server::start(&[&common::text(&path), "--expert-memory", "20%", "--heat", "off"]);
    let body = json!({ "messages": question("Tell me a story."), "max_tokens": 30, "temperature": 0 });
    let before = server.post(CHAT, &body).ok();
    let bytes = std::fs::read(&path).unwrap();
    OpenOptions::new().write(true).open(&path).unwrap().set_len(bytes.len() as u64 / 2).unwrap();
    let failed = server.post(CHAT, &body);
    assert_eq!(failed.status, 500, "{}", failed.text());
    assert!(!failed.text().contains("model.gguf") && !failed.text().contains("tmp"), "{}", failed.text());
    let start = Instant::now();
    while !server.log().contains("model.gguf") {
        assert!(start.elapsed() < SOON, "the log names no file: {}", server.log());
        std::thread::sleep(Duration::from_millis(5));
    }
    let chunks = server.stream(CHAT, &body).chunks();
    assert_eq!(chunks.last().unwrap()["error"]["type"], "server_error");
    assert_eq!(server.get("/ready").status, 503);
    assert_eq!(server.get("/health").ok()["state"], "failing");
    std::fs::write(&path, bytes).unwrap();
    let after = server.post(CHAT, &body).ok();
    assert_eq!(after["choices"], before["choices"]);
    assert_eq!(server.get("/ready").status, 200);
}

#[test]
fn while_the_model_is_loaded_requests_are_told_to_come_back() {
    let folder = tempfile::tempdir().unwrap();
    let model = common::golden("qwen35moe");
    for entry in std::fs::read_dir(&model).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    // A pipe is read when somebody writes to it, so loading takes as long as is needed here.
    let pipe = folder.path().join("tokenizer.json");
    std::fs::remove_file(&pipe).unwrap();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut server = Server::start_unready(&[&common::text(folder.path())]);
    let loading = json!({ "status": "ok", "state": "loading", "loaded": null, "needs_key": false });
    assert_eq!(server.get("/health").ok(), loading, "the page shows this");
    assert_eq!(server.get("/").status, 200);
    let ask = json!({ "messages": question("Hi"), "max_tokens": 1 });
    for response in [server.get("/ready"), server.get("/v1/models"), server.post(CHAT, &ask)] {
        assert_eq!(response.status, 503, "{}", response.text());
        assert_eq!(response.json()["error"]["code"], "model_loading");
        assert!(response.header("retry-after").is_some());
    }
    let bytes = std::fs::read(Path::new(&model).join("tokenizer.json")).unwrap();
    OpenOptions::new().write(true).open(&pipe).unwrap().write_all(&bytes).unwrap();
    let start = Instant::now();
    while server.get("/ready").status != 200 {
        assert!(start.elapsed() < SOON * 4, "{}", server.log());
    }
    server.post(CHAT, &ask).ok();
    server.signal("TERM");
    assert_eq!(server.wait(SOON), Some(0));

    // A model that is being loaded keeps nobody from leaving.
    let mut server = Server::start_unready(&[&common::text(folder.path())]);
    server.signal("TERM");
    assert_eq!(server.wait(SOON), Some(0));
}

#[test]
fn what_cannot_be_served_is_said_at_once() {
    let failure = |args: &[&str]| common::call(args);
    let missing = failure(&["serve", "/nonexistent/model.gguf", "--port", "0"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.stderr.contains("error: /nonexistent/model.gguf: cannot open"), "{missing:?}");
    let server = Server::start(&[]);
    let port = server.address.rsplit(':').next().unwrap();
    let taken = failure(&["serve", "--port", port]).failure(1);
    assert!(taken.contains("cannot listen at 127.0.0.1") && taken.contains("--port"), "{taken}");
    let keys = failure(&["serve", "--port", "0", "--api-key", ""]).failure(1);
    assert!(keys.contains("empty"), "{keys}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys");
    std::fs::write(&file, "").unwrap();
    let none = failure(&["serve", "--port", "0", "--api-key-file", &common::text(&file)]).failure(1);
    assert!(none.contains("contains no key"), "{none}");
}

#[test]
fn progress_is_told_to_those_who_ask() {
    let server = Server::start(&[]);
    let text = "the cat sat on the mat and ".repeat(60);
    let mut body = json!({ "messages": question(&text), "max_tokens": 2 });
    assert!(server.stream(CHAT, &body).chunks().iter().all(|chunk| chunk.get("prompt_progress").is_none()));
    body["return_progress"] = true.into();
    body["messages"] = question(&format!("Now {text}"));
    let chunks = server.stream(CHAT, &body).chunks();
    let told: Vec<_> = chunks.iter().filter_map(|chunk| chunk.get("prompt_progress")).collect();
    let (first, last) = (told[0], told.last().unwrap());
    assert_eq!((&first["processed"], &first["seconds_left"]), (&json!(0), &json!(null)));
    assert_eq!((&last["processed"], &last["seconds_left"]), (&last["total"], &json!(0.0)));
    assert!(told.is_sorted_by_key(|progress| progress["processed"].as_u64()), "{told:?}");
    assert!(chunks[0].get("prompt_progress").is_none(), "the role comes first");
    drop(Response::read(server.send("GET", "/health", &[], b"")));
}

#[test]
fn conversations_are_kept_from_start_to_start() {
    let cache = tempfile::tempdir().unwrap();
    let system = "You tell stories about the sea, about boats, and about cats that sail on them. ".repeat(12);
    let mut messages =
        json!([{ "role": "system", "content": system }, { "role": "user", "content": "Tell me a story." }]);
    let ask = |server: &Server, messages: &Value| {
        let body = json!({ "messages": messages, "max_tokens": 12, "temperature": 0 });
        let answer = server.post(CHAT, &body).ok();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        (prompt, cached, answer["choices"][0]["message"].clone())
    };
    let mut server = Server::start_in(cache.path(), &[]);
    let (first, cached, said) = ask(&server, &messages);
    assert!(first > 150 && cached == 0, "{first} tokens, {cached} cached");
    messages.as_array_mut().unwrap().extend([said, json!({ "role": "user", "content": "And then?" })]);
    let (second, cached, _) = ask(&server, &messages);
    assert!(second > first && cached >= first - 2, "{cached} of {second} cached");
    server.signal("TERM");
    assert_eq!(server.wait(SOON), Some(0));
    let server = Server::start_in(cache.path(), &[]);
    let (_, cached, after) = ask(&server, &messages);
    assert!(cached >= first - 2, "{cached} cached after a start");
    let alone = Server::start(&["--prefix-cache", "off"]);
    let (_, cached, without) = ask(&alone, &messages);
    assert_eq!((cached, without), (0, after));
}

#[test]
fn those_who_wait_hear_that_the_server_lives() {
    let server = Server::start(&[&SLOW[..], &["--parallel", "1"]].concat());
    let mut body = endless(&server);
    // Several, one after another: that takes long enough on any machine.
    body["n"] = 8.into();
    let mut before = server.stream(CHAT, &body);
    before.next().unwrap();
    body["n"] = 1.into();
    let start = Instant::now();
    let mut waits = server.stream(CHAT, &body);
    let first: Value = serde_json::from_str(&waits.next().unwrap()).unwrap();
    assert_eq!(first["choices"][0]["delta"]["role"], "assistant");
    assert!(start.elapsed() < SOON, "the role comes at once, not after {:?}", start.elapsed());
    let message = json!({ "messages": body["messages"], "max_tokens": 3 });
    let mut message = server.stream("/v1/messages", &message);
    // In Anthropic's API these are events.
    for kind in ["message_start", "ping"] {
        let event: Value = serde_json::from_str(&message.next().unwrap()).unwrap();
        assert_eq!(event["type"], kind);
    }
    waits.comment();
    drop(before);
}

#[test]
fn one_client_leaves_places_to_others_and_keys_share_no_conversations() {
    let keys = ["--api-key", "open sesame", "--api-key", "other key"];
    let server = Server::start(&[&["--parallel", "4", "--queue", "4"][..], &keys].concat());
    let other = |body: &Value| {
        let headers = [("authorization", "Bearer other key")];
        server.call("POST", CHAT, &headers, body.to_string().as_bytes())
    };
    let cached = |response: Response| {
        assert_eq!(response.status, 200, "{}", response.text());
        response.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let hello = json!({ "messages": question("Xylophones and zebras, all day long."), "max_tokens": 2 });
    let own = || server.post(CHAT, &hello);
    assert_eq!(cached(own()), 0);
    assert!(cached(own()) > 0, "it was asked before");
    assert_eq!(cached(other(&hello)), 0, "not by this key");
    assert!(cached(other(&hello)) > 0);

    let mut many = endless(&server);
    many["n"] = 6.into();
    let greedy = server.stream(CHAT, &many);
    server.wait_for_metric("forebay_requests_open", 6.0, SOON);
    assert_eq!(own().status, 429, "six of eight places are one client's share");
    assert!(cached(other(&hello)) > 0, "there is room for others, without waiting for those six to end");
    assert_eq!(server.metric("forebay_requests_open"), 6.0);
    drop(greedy);
    server.wait_for_metric("forebay_requests_open", 0.0, SOON);

    let log = server.log();
    assert!(log.contains("closest conversation"), "{log}");
    for word in ["ylophone", "zebra", "story"] {
        assert!(!log.contains(word), "the log quotes what was asked: {log}");
    }
}
