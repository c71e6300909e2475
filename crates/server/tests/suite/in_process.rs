//! Requests that the program hands to the server itself.

use std::time::{Duration, Instant};

use forebay_engine::Prompter;
use forebay_server::{Body, Caller, Running, Server, ServerOptions, http};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::engine;

/// No machine takes so long.
const LIMIT: Duration = Duration::from_secs(60);

struct Program {
    server: Server,
    runtime: Runtime,
    _running: Running,
}

type Response = http::Response<Body>;

impl Program {
    fn new(options: ServerOptions) -> Program {
        let server = Server::new("tales", options).unwrap();
        let running = server.start(Prompter::new(&engine()), None).unwrap();
        Program { server, runtime: forebay_server::runtime().unwrap(), _running: running }
    }

    fn get(&self, path: &str) -> (u16, String) {
        let request = http::Request::get(path).body(Body::empty()).unwrap();
        self.read(self.runtime.block_on(self.server.handle(request, Caller::trusted())))
    }

    /// The response to a chat, of which only the head is there.
    fn chat(&self, body: Value, headers: &[(&str, &str)], caller: Caller) -> Response {
        let mut request = http::Request::post("/v1/chat/completions");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(body.to_string()).unwrap();
        self.runtime.block_on(self.server.handle(request, caller))
    }

    fn read(&self, response: Response) -> (u16, String) {
        let status = response.status().as_u16();
        let body = self.runtime.block_on(response.into_body().collect()).unwrap().to_bytes();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    fn status(&self, headers: &[(&str, &str)], caller: Caller) -> u16 {
        self.chat(short(), headers, caller).status().as_u16()
    }

    /// Waits until a line is in the metrics.
    #[track_caller]
    fn wait_for(&self, line: &str) {
        let start = Instant::now();
        while !self.get("/metrics").1.lines().any(|other| other == line) {
            assert!(start.elapsed() < LIMIT, "{line} does not come:\n{}", self.get("/metrics").1);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn short() -> Value {
    json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 2 })
}

/// An answer that does not end by itself.
fn endless() -> Value {
    json!({
        "messages": [{ "role": "user", "content": "Tell me a story." }],
        "ignore_eos": true,
        "stream": true,
    })
}

#[test]
fn a_response_begins_before_its_body_is_complete() {
    let program = Program::new(ServerOptions::new());
    let (status, text) = program.read(program.chat(short(), &[], Caller::trusted()));
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (status, &answer["object"], &answer["model"]),
        (200, &json!("chat.completion"), &json!("tales"))
    );
    assert_eq!(answer["usage"]["completion_tokens"], 2);

    let mut response = program.chat(endless(), &[], Caller::trusted());
    assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
    for _ in 0..4 {
        let frame = program.runtime.block_on(response.body_mut().frame()).unwrap().unwrap();
        assert!(frame.into_data().unwrap().starts_with(b"data: {"));
    }
}

#[test]
fn a_request_ends_with_its_body() {
    let program = Program::new(ServerOptions::new());
    let response = program.chat(endless(), &[], Caller::trusted());
    program.wait_for("forebay_requests_open 1");
    drop(response);
    program.wait_for("forebay_requests_open 0");
    program.wait_for("forebay_answers_cancelled_total 1");
}

#[test]
fn the_caller_says_which_checks_apply() {
    let program = Program::new(ServerOptions::new().keys(vec!["secret".into()]));
    let (right, wrong) = ([("x-api-key", "secret")], [("x-api-key", "guessed")]);
    assert_eq!(program.status(&wrong, Caller::trusted()), 200);
    assert_eq!(program.status(&[], Caller::trusted().check_keys()), 401);
    assert_eq!(program.status(&wrong, Caller::trusted().check_keys()), 401);
    assert_eq!(program.status(&right, Caller::trusted().check_keys()), 200);

    let program = Program::new(ServerOptions::new());
    for foreign in [("host", "evil.example"), ("origin", "https://evil.example")] {
        assert_eq!(program.status(&[foreign], Caller::trusted()), 200, "{foreign:?}");
        assert_eq!(program.status(&[foreign], Caller::trusted().check_names()), 403, "{foreign:?}");
        let peer = "192.0.2.1:1".parse().unwrap();
        assert_eq!(program.status(&[foreign], Caller::connection(peer)), 403, "{foreign:?}");
    }
}

#[test]
fn only_a_connection_is_limited_to_its_share() {
    // Four places, of which one client gets three.
    let program = Program::new(ServerOptions::new().parallel(2).queue(2));
    let peer = Caller::trusted().peer("192.0.2.1:1".parse().unwrap());
    let held: Vec<_> = (0..3).map(|_| program.chat(endless(), &[], peer)).collect();
    assert!(held.iter().all(|response| response.status() == 200));
    assert_eq!(program.status(&[], peer), 429);
    drop(held);
    program.wait_for("forebay_requests_open 0");
    let held: Vec<_> = (0..4).map(|_| program.chat(endless(), &[], Caller::trusted())).collect();
    assert!(held.iter().all(|response| response.status() == 200));
    assert_eq!(program.status(&[], Caller::trusted()), 429, "there are no more places");
}

#[test]
fn messages_name_options_as_the_program_does() {
    let long = json!({ "messages": [{ "role": "user", "content": "x".repeat(2000) }] });
    let message = |options: ServerOptions| {
        let program = Program::new(options.max_body(1000));
        let (status, text) = program.read(program.chat(long.clone(), &[], Caller::trusted()));
        assert_eq!(status, 413, "{text}");
        text
    };
    assert!(message(ServerOptions::new()).contains("(ServerOptions::max_body)"));
    let words = |text: &str| text.replace("ServerOptions::max_body", "max_body=");
    assert!(message(ServerOptions::new().words(words)).contains("(max_body=)"));
}

#[test]
fn nothing_is_answered_before_the_start_and_after_the_end() {
    let program = Program::new(ServerOptions::new());
    program.server.unload();
    assert_eq!(program.status(&[], Caller::trusted()), 503);
    assert!(program.server.driver().is_none());
    let _running = program.server.start(Prompter::new(&engine()), None).unwrap();
    assert_eq!(program.status(&[], Caller::trusted()), 200);
    program.server.drain();
    assert_eq!(program.status(&[], Caller::trusted()), 503);
}

#[test]
fn an_empty_key_is_refused() {
    assert!(Server::new("tales", ServerOptions::new().keys(vec![" ".into()])).is_err());
}
