//! `forebay serve`: the page, and what it draws.

#![cfg(unix)]

use std::time::Duration;

use serde_json::{Value, json};

use crate::common::server::{Response, Server, Stream, question};

#[test]
fn the_page_and_its_files_need_no_key_and_come_once() {
    let server = Server::start(&["--api-key", "open sesame"]);
    // The empty header keeps the client from sending the right one.
    let get = |path: &str, headers: &[(&str, &str)]| {
        server.call("GET", path, &[&[("x-api-key", "")], headers].concat(), b"")
    };
    let page = get("/", &[]);
    assert_eq!(page.status, 200);
    assert!(page.text().starts_with("<!doctype html>"));
    let policy = page.header("content-security-policy").unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"),
        "{policy}"
    );
    let files = [
        ("/page/app.js", "text/javascript"),
        ("/page/style.css", "text/css"),
        ("/page/icon.svg", "image/svg+xml"),
    ];
    for (path, kind) in files {
        let file = get(path, &[]);
        assert_eq!(file.status, 200, "{path}");
        assert!(file.header("content-type").unwrap().starts_with(kind), "{path}");
        let tag = file.header("etag").unwrap().to_owned();
        let again = get(path, &[("if-none-match", &tag)]);
        assert_eq!((again.status, again.text().len()), (304, 0), "{path}");
    }
    // Before it has a key, the page finds out that it needs one.
    assert_eq!(get("/health", &[]).ok()["needs_key"], true);
    assert_eq!(get("/page/nothing.js", &[]).status, 401);
    assert_eq!(get("/live", &[]).status, 401);
}

/// The next frame of a picture, and its changes.
fn frame(live: &mut Stream) -> (Value, Vec<u8>) {
    let frame: Value = serde_json::from_str(&live.next().unwrap()).unwrap();
    let changes = base64(frame["changes"].as_str().unwrap());
    (frame, changes)
}

fn base64(text: &str) -> Vec<u8> {
    const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits = text.trim_end_matches('=').chars().map(|letter| LETTERS.find(letter).unwrap() as u32);
    let bits: Vec<u32> = bits.collect();
    bits.chunks(4)
        .flat_map(|four| {
            let sum = (0..4).fold(0, |sum, i| sum << 6 | four.get(i).copied().unwrap_or(0));
            [(sum >> 16) as u8, (sum >> 8) as u8, sum as u8].into_iter().take(four.len() - 1)
        })
        .collect()
}

/// Brings the codes of all experts up to date, as docs/page.md says.
fn apply(codes: &mut [u8], changes: &[u8]) {
    let (mut at, mut bytes) = (0, changes.iter());
    while let Some(&byte) = bytes.next() {
        at += usize::from(byte);
        if byte < 255 {
            codes[at] = *bytes.next().unwrap();
            at += 1;
        }
    }
}

#[test]
fn a_picture_shows_experts_come_and_answers_grow() {
    let server = Server::start(&["--expert-memory", "50%", "--heat", "off"]);
    let mut live = Stream::read(server.send("GET", "/live", &[], b""));
    let machine: Value = serde_json::from_str(&live.next().unwrap()).unwrap();
    let layers = machine["layers"].as_array().unwrap();
    let experts: u64 = layers.iter().map(|layer| layer[1].as_u64().unwrap()).sum();
    assert!(experts > 0 && machine["memory"]["dense"].as_u64().unwrap() > 0, "{machine}");
    assert!(machine["verdict"].as_str().unwrap().starts_with("Runs"), "{machine}");
    let mut codes = vec![0; experts as usize];
    let (first, changes) = frame(&mut live);
    apply(&mut codes, &changes);
    assert_eq!((&first["tokens"], &first["running"]), (&json!(0), &json!(0)));
    assert!(codes.iter().all(|code| *code == 0), "nothing has been asked for");

    server
        .post("/v1/chat/completions", &json!({ "messages": question("A tale, please."), "max_tokens": 20 }))
        .ok();
    // Until the picture has seen the end of it.
    let mut flashed = 0;
    let last = loop {
        let (now, changes) = frame(&mut live);
        apply(&mut codes, &changes);
        flashed += codes.iter().filter(|code| **code >= 4).count();
        if now["running"] == 0 && now["tokens"].as_u64().unwrap() > 0 {
            break now;
        }
    };
    assert!(flashed > 20, "{flashed}");
    let resident = codes.iter().filter(|code| **code & 3 == 2).count() as u64;
    assert!(resident > experts / 4 && resident <= experts / 2, "{resident} of {experts}");
    assert!(last["misses"].as_u64().unwrap() > 0 && last["read"].as_u64().unwrap() > 0, "{last}");
    assert!(last["prompt_tokens"].as_u64().unwrap() > 5, "{last}");
    // What nobody asks for any more is quiet.
    let (_, changes) = frame(&mut live);
    apply(&mut codes, &changes);
    let (_, changes) = frame(&mut live);
    apply(&mut codes, &changes);
    assert!(codes.iter().all(|code| *code < 4), "{codes:?}");
}

#[test]
fn an_open_picture_keeps_no_server_from_leaving_and_too_many_are_refused() {
    let mut server = Server::start(&[]);
    let mut watching: Vec<_> = (0..16).map(|_| Stream::read(server.send("GET", "/live", &[], b""))).collect();
    for live in &mut watching {
        live.next().unwrap();
    }
    let refused: Response = server.get("/live");
    assert_eq!(refused.status, 429);
    assert!(refused.header("retry-after").is_some());
    server.signal("TERM");
    assert_eq!(server.wait(Duration::from_secs(20)), Some(0));
}
