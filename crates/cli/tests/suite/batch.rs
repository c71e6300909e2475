//! `forebay batch`: the same answers whatever goes on beside them, and every one once whatever happens.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common;
use crate::common::server::Server;
use crate::common::{call, forebay, text};

const THINGS: [&str; 12] = [
    "a cat",
    "a boat",
    "the sea",
    "two dogs",
    "a tree",
    "a red ball",
    "a king",
    "rain",
    "a mouse",
    "bread",
    "a song",
    "the moon",
];

/// A file of requests, some with randomness and a seed of their own, some without.
fn requests(folder: &Path) -> PathBuf {
    let path = folder.join("in.jsonl");
    let mut lines = String::new();
    for (i, thing) in THINGS.iter().enumerate() {
        let mut body = json!({
            "model": "whatever",
            "messages": [{ "role": "user", "content": format!("Tell me a story about {thing}.") }],
            "max_tokens": 8 + i * 3,
        });
        if i % 3 == 1 {
            body["temperature"] = 0.into();
        }
        if i % 3 == 2 {
            body["seed"] = 7.into();
            body["stop"] = json!(["the "]);
        }
        let line =
            json!({ "custom_id": thing, "method": "POST", "url": "/v1/chat/completions", "body": body });
        lines.push_str(&format!("{line}\n"));
    }
    std::fs::write(&path, lines).unwrap();
    path
}

/// The answers by name; each must be there once.
fn answers(path: &Path) -> BTreeMap<String, Value> {
    let mut answers = BTreeMap::new();
    for line in std::fs::read_to_string(path).unwrap().lines() {
        let mut answer: Value = serde_json::from_str(line).unwrap();
        answer["response"]["body"].as_object_mut().unwrap().shift_remove("created");
        let name = answer["custom_id"].as_str().unwrap().to_owned();
        assert!(answers.insert(name.clone(), answer).is_none(), "{name} is there twice");
    }
    answers
}

fn batch(input: &Path, out: &Path, more: &[&str]) -> common::Outcome {
    let (input, out) = (text(input), text(out));
    call(&[&["batch", &input, "--out", &out, "--threads", "2"], more].concat())
}

#[test]
fn answers_do_not_depend_on_what_is_answered_beside_them() {
    let folder = tempfile::tempdir().unwrap();
    let input = requests(folder.path());
    let out = |name: &str| folder.path().join(name);
    let said = batch(&input, &out("together"), &[]).success();
    assert!(said.starts_with("12 requests answered · "), "{said}");
    batch(&input, &out("alone"), &["--parallel", "1"]).success();
    batch(&input, &out("streamed"), &["--parallel", "5", "--expert-memory", "20%"]).success();
    let together = answers(&out("together"));
    assert_eq!(together.len(), THINGS.len());
    assert_eq!(together, answers(&out("alone")));
    assert_eq!(together, answers(&out("streamed")));

    let cat = &together["a cat"]["response"];
    assert_eq!((&cat["status_code"], &cat["body"]["object"]), (&json!(200), &json!("chat.completion")));
    assert_eq!(cat["body"]["usage"]["completion_tokens"], 8);
    assert_eq!(cat["body"]["choices"][0]["finish_reason"], "length");
    let sea = &together["the sea"]["response"]["body"]["choices"][0];
    assert!(!sea["message"]["content"].as_str().unwrap().contains("the "), "{sea}");

    // With temperature 0 it is what `run` answers.
    let prompt = "Tell me a story about a boat.";
    let run = call(&["run", "-p", prompt, "--temp", "0", "-n", "11", "--threads", "2"]).success();
    assert_eq!(together["a boat"]["response"]["body"]["choices"][0]["message"]["content"], run.trim_end());
}

#[test]
fn a_call_that_was_killed_goes_on_and_every_answer_is_there_once() {
    let folder = tempfile::tempdir().unwrap();
    let input = requests(folder.path());
    // The last takes longer than all others, so that none of them is the last: its answer has no end of its own.
    let ends =
        call(&["tokenize", &common::demo_model(), "--ids", "--text", "<|im_end|><|endoftext|>"]).success();
    let ends: Vec<u32> = serde_json::from_str(&ends).unwrap();
    let bias: BTreeMap<String, i32> = ends.iter().map(|id| (id.to_string(), -100)).collect();
    let body = json!({ "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 500, "logit_bias": bias });
    let long = json!({ "custom_id": "long", "body": body });
    std::fs::write(&input, format!("{}{long}\n", std::fs::read_to_string(&input).unwrap())).unwrap();
    let (out, whole) = (folder.path().join("out"), folder.path().join("whole"));
    batch(&input, &whole, &[]).success();
    // One after another, so that there is a middle.
    let args = ["batch", &text(&input), "--out", &text(&out), "--threads", "1", "--parallel", "1", "--exact"];
    let mut child = forebay(args).spawn().unwrap();
    let start = Instant::now();
    while std::fs::read_to_string(&out).unwrap_or_default().lines().count() < 3 {
        assert!(start.elapsed() < Duration::from_secs(60), "no answers");
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let before = std::fs::read_to_string(&out).unwrap();
    assert!(before.lines().count() <= THINGS.len(), "it was too fast to be killed");
    // As if it had been in the middle of a line.
    std::fs::write(&out, format!("{before}{{\"custom_id\": \"a k")).unwrap();
    let said = batch(&input, &out, &["--exact"]).success();
    assert!(said.contains("by earlier runs"), "{said}");
    let after = std::fs::read_to_string(&out).unwrap();
    assert!(after.starts_with(&before), "what was there has changed");
    assert_eq!(answers(&out).keys().collect::<Vec<_>>(), answers(&whole).keys().collect::<Vec<_>>());
    let said = batch(&input, &out, &[]).success();
    assert!(said.contains("all 13 requests are answered"), "{said}");
}

#[test]
fn what_cannot_be_answered_is_said_in_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    let hello = json!([{ "role": "user", "content": "Hello" }]);
    let long = json!([{ "role": "user", "content": "word ".repeat(5000) }]);
    let bodies = [
        ("good", json!({ "messages": hello, "max_tokens": 2, "tool_choice": "none" })),
        ("empty", json!({ "messages": [] })),
        ("many", json!({ "messages": hello, "n": 200 })),
        ("streamed", json!({ "messages": hello, "stream": true })),
        ("hot", json!({ "messages": hello, "temperature": -1 })),
        ("forced", json!({ "messages": hello, "tool_choice": "required" })),
        ("long", json!({ "messages": long })),
        ("wrong", json!({ "messages": "Hello" })),
    ];
    let mut lines: String =
        bodies.iter().map(|(id, body)| format!("{}\n", json!({ "custom_id": id, "body": body }))).collect();
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0 });
    lines.push_str(&format!("{}\n", json!({ "custom_id": "raw", "url": "/v1/completions", "body": body })));
    lines.push_str(&format!("{}\n", json!({ "custom_id": "lost", "url": "/v1/images", "body": body })));
    std::fs::write(&input, lines).unwrap();
    let outcome = batch(&input, &out, &[]);
    assert_eq!(outcome.code, Some(1), "{outcome:?}");
    assert!(
        outcome.stdout.starts_with("2 requests answered, 8 refused (their lines in the file say why)"),
        "{outcome:?}"
    );
    // Made again, the call finds the same and says the same, with the same exit code.
    let again = batch(&input, &out, &[]);
    assert_eq!(again.code, Some(1), "{again:?}");
    let said = "all 10 requests are answered, 8 of them refused (their lines in the file say why)";
    assert!(again.stdout.contains(said), "{again:?}");
    // Also if only some of it was there: a refusal of an earlier call is still one.
    let whole = std::fs::read_to_string(&out).unwrap();
    let part: String =
        whole.lines().filter(|line| !line.contains("\"raw\"")).map(|l| format!("{l}\n")).collect();
    std::fs::write(&out, part).unwrap();
    let rest = batch(&input, &out, &[]);
    assert_eq!(rest.code, Some(1), "{rest:?}");
    let said = "1 requests answered, 1 by earlier runs, 8 refused (their lines in the file say why)";
    assert!(rest.stdout.starts_with(said), "{rest:?}");
    let answers = answers(&out);
    assert_eq!(answers["good"]["response"]["status_code"], 200);
    let raw = call(&["run", "--raw", "-p", "Once upon a time", "-n", "4", "--temp", "0"]).success();
    let continued = &answers["raw"]["response"]["body"];
    assert_eq!(continued["object"], "text_completion");
    assert_eq!(continued["choices"][0]["text"], raw.trim_end_matches('\n'));
    for (id, param, said) in [
        ("empty", json!("messages"), "no messages"),
        ("many", json!("n"), "between 1 and 128"),
        ("streamed", json!("stream"), "not streamed"),
        ("hot", json!("temperature"), "temperature"),
        ("forced", json!("tool_choice"), "there are no tools"),
        ("long", json!("messages"), "1024"),
        ("wrong", json!("messages"), "is invalid"),
        ("lost", json!("url"), "/v1/chat/completions and /v1/completions"),
    ] {
        let response = &answers[id]["response"];
        assert_eq!(response["status_code"], 400, "{id}");
        let error = &response["body"]["error"];
        assert_eq!(error["param"], param, "{id}");
        assert!(error["message"].as_str().unwrap().contains(said), "{id}: {error}");
    }
}

/// A template of a model that calls tools and reasons. What the demo model makes of it is of no concern: the answers here
/// are held to a form.
const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{\"name\": …, \"arguments\": …}</tool_call><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.content %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

/// A body less what differs from one answer to the next: names, times, and what was measured.
fn comparable(mut body: Value) -> Value {
    for field in ["id", "created", "timings", "experts"] {
        body.as_object_mut().unwrap().shift_remove(field);
    }
    if let Some(usage) = body["usage"].as_object_mut() {
        usage.shift_remove("prompt_tokens_details");
    }
    for choice in body["choices"].as_array_mut().into_iter().flatten() {
        let calls = choice.pointer_mut("/message/tool_calls").and_then(Value::as_array_mut);
        for call in calls.into_iter().flatten() {
            assert!(call["id"].as_str().unwrap().starts_with("call_"), "{call}");
            call["id"] = Value::Null;
        }
    }
    body
}

#[test]
fn answers_are_those_of_the_server_to_the_byte() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    let template = folder.path().join("template.jinja");
    std::fs::write(&template, TEMPLATE).unwrap();
    let template = ["--chat-template-file", &text(&template)];
    let parameters = json!({
        "type": "object",
        "properties": { "count": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["count"],
        "additionalProperties": false,
    });
    let tools = json!([{ "type": "function", "function": { "name": "take", "parameters": parameters } }]);
    let schema = json!({ "type": "json_schema", "json_schema": { "name": "balls", "schema": parameters } });
    let thinks = json!({ "enable_thinking": true });
    let ask = |more: Value| {
        let messages = json!([{ "role": "user", "content": "Which balls?" }]);
        let mut body = json!({ "messages": messages, "max_tokens": 60, "temperature": 0.7, "seed": 3 });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let (chat, continued) = ("/v1/chat/completions", "/v1/completions");
    let bodies = [
        ("text", chat, ask(json!({}))),
        ("object", chat, ask(json!({ "response_format": { "type": "json_object" } }))),
        (
            "schema",
            chat,
            ask(json!({ "response_format": schema, "chat_template_kwargs": thinks, "thinking_budget": 5 })),
        ),
        (
            "call",
            chat,
            ask(
                json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 200 }),
            ),
        ),
        ("no call", chat, ask(json!({ "tools": tools, "tool_choice": "none" }))),
        ("scored", chat, ask(json!({ "logprobs": true, "top_logprobs": 2, "max_tokens": 5 }))),
        ("three", chat, ask(json!({ "n": 3, "max_tokens": 8 }))),
        ("wrong", chat, ask(json!({ "response_format": { "type": "xml" } }))),
        (
            "unknown",
            chat,
            ask(
                json!({ "tools": tools, "tool_choice": { "type": "function", "function": { "name": "f" } } }),
            ),
        ),
        (
            "continued",
            continued,
            json!({ "prompt": ["Once", "There"], "n": 2, "max_tokens": 6, "seed": 1, "echo": true }),
        ),
        ("scored text", continued, json!({ "prompt": "Once", "max_tokens": 6, "seed": 1, "logprobs": 2 })),
        (
            "form",
            continued,
            json!({ "prompt": "Data: ", "max_tokens": 60, "seed": 1, "json_schema": parameters }),
        ),
    ];
    let lines: String = bodies
        .iter()
        .map(|(id, url, body)| format!("{}\n", json!({ "custom_id": id, "url": url, "body": body })))
        .collect();
    std::fs::write(&input, lines).unwrap();
    let outcome = batch(&input, &out, &template);
    assert!(outcome.stdout.starts_with("10 requests answered, 2 refused"), "{outcome:?}");
    let answers = answers(&out);
    let server = Server::start(&[&template[..], &["--threads", "2"]].concat());
    for (id, url, body) in bodies {
        let response = server.post(url, &body);
        let written = &answers[id]["response"];
        assert_eq!(written["status_code"], response.status, "{id}");
        let (ours, theirs) = (comparable(written["body"].clone()), comparable(response.json()));
        // As text, so that fields come in the same order.
        assert_eq!(ours.to_string(), theirs.to_string(), "{id}");
    }
    let choice = |id: &str, at: usize| answers[id]["response"]["body"]["choices"][at].clone();
    assert_eq!(choice("call", 0)["finish_reason"], "tool_calls");
    assert_eq!(choice("call", 0)["message"]["tool_calls"][0]["function"]["name"], "take");
    let said: Value =
        serde_json::from_str(choice("schema", 0)["message"]["content"].as_str().unwrap()).unwrap();
    assert!(said["count"].is_u64());
    assert_eq!(choice("scored", 0)["logprobs"]["content"].as_array().unwrap().len(), 5);
    assert_ne!(choice("three", 0)["message"], choice("three", 2)["message"]);
    assert!(choice("continued", 3)["text"].as_str().unwrap().starts_with("There"));
    // Made again, it has the same ids, too.
    let again = folder.path().join("again");
    batch(&input, &again, &template);
    assert_eq!(answers, super::batch::answers(&again));
}

#[test]
fn files_that_make_no_sense_are_refused_before_anything_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (folder.path().join("in"), folder.path().join("out"));
    let line = json!({ "custom_id": "a", "body": { "messages": [] } }).to_string();
    for (content, said) in [
        (String::new(), "has no requests"),
        ("{}".to_owned(), "line 1: not a request with custom_id and body"),
        (format!("{line}\n\n{line}\n"), "line 3: custom_id \"a\" is also the custom_id of line 1"),
    ] {
        std::fs::write(&input, content).unwrap();
        let message = batch(&input, &out, &[]).failure(1);
        assert!(message.contains(said), "{message}");
        assert!(!out.exists(), "{said}");
    }
    std::fs::write(&input, &line).unwrap();
    std::fs::write(&out, "A diary.\nDo not overwrite.\n").unwrap();
    let message = batch(&input, &out, &[]).failure(1);
    assert!(message.contains("line 1: not an answer; --out names a file of another kind"), "{message}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "A diary.\nDo not overwrite.\n");
    let missing = folder.path().join("missing");
    assert!(batch(&missing, &out, &[]).failure(1).contains("cannot open"));
}

/// Requests are read as they are needed: a file that is larger does not need more memory. All of these are refused, so that
/// nothing is computed.
#[cfg(target_os = "linux")]
#[test]
fn a_long_file_takes_no_more_memory_than_a_short_one() {
    use std::io::Write;
    const LINES: usize = 800;
    let folder = tempfile::tempdir().unwrap();
    let padding = "x".repeat(128 << 10);
    let peak = |lines: usize| {
        let (input, out) = (folder.path().join("in"), folder.path().join(format!("out-{lines}")));
        let mut file = std::io::BufWriter::new(std::fs::File::create(&input).unwrap());
        for i in 0..lines {
            let line = json!({ "custom_id": i.to_string(), "body": { "messages": [], "metadata": { "a": padding } } });
            writeln!(file, "{line}").unwrap();
        }
        file.into_inner().unwrap();
        let mut child = forebay(["batch", &text(&input), "--out", &text(&out)]).spawn().unwrap();
        let mut most = 0;
        while child.try_wait().unwrap().is_none() {
            // The largest so far, so that nothing is missed between two looks.
            let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
            most = most.max(kib.unwrap_or(0) << 10);
            std::thread::sleep(Duration::from_millis(2));
        }
        assert_eq!(child.wait().unwrap().code(), Some(1));
        assert_eq!(std::fs::read_to_string(&out).unwrap().lines().count(), lines);
        most
    };
    let (short, long) = (peak(2), peak(LINES));
    let file = (LINES * padding.len()) as u64;
    assert!(short > 0 && long < short + file / 2, "{short} and {long} bytes, the file has {file}");
}

/// What comes through a pipe is answered, too, although it can be read only once.
#[cfg(unix)]
#[test]
fn requests_may_come_through_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let (input, out) = (requests(folder.path()), folder.path().join("out"));
    let args = ["batch", "/dev/stdin", "--out", &text(&out), "-n", "4"];
    let outcome = common::call_with_input(&args, &std::fs::read(input).unwrap());
    assert!(outcome.success().starts_with("12 requests answered"));
    assert_eq!(answers(&out).len(), THINGS.len());
}
