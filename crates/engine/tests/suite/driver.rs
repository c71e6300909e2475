//! The driver: any thread may ask, answers come in typed pieces, and dropping a handle cancels its answer.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};

use forebay_engine::chat::{ChatTemplate, Message};
use forebay_engine::conversation::{Format, ReplyOptions, ToolChoice};
use forebay_engine::driver::{Ending, Observer};
use forebay_engine::internals::generate::sampler::SamplingOverrides;
use forebay_engine::{
    ChatRequest, Driver, DriverOptions, Engine, Error, FinishReason, Grammar, MemoryEntry, Options,
    PrefixOptions, Prompter, Purpose, Reply, ReplyEvent, ReplyStream, Request,
};
use serde_json::{Value, json};

use crate::common::models::demo_model;

/// Ends a test that hangs. No test takes this long.
const LIMIT: Duration = Duration::from_secs(300);

/// A template of a model that calls tools and reasons. What the demo model makes of it does not matter, because
/// grammars determine the form of the answers.
const TEMPLATE: &str = "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{\"name\": …, \"arguments\": …}</tool_call><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n
{%- if m.content %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}";

fn engine() -> Engine {
    Engine::open(&demo_model(), &Options::default().threads(2)).unwrap()
}

/// An engine whose model calls tools and reasons, and its prompter.
fn with_tools() -> (Engine, Prompter) {
    let engine = engine();
    let template = ChatTemplate::new(TEMPLATE, &[]).unwrap();
    let prompter = Prompter::new(&engine).with_template(Some(Arc::new(template)));
    (engine, prompter)
}

fn start(engine: &Engine) -> Driver {
    Driver::start(engine, DriverOptions::new(4)).unwrap()
}

/// A question with its own seed.
fn question(thing: &str, max_tokens: usize, seed: u64) -> ChatRequest {
    let sampling = SamplingOverrides { seed: Some(seed), ..SamplingOverrides::default() };
    ChatRequest::user(format!("Tell me a story about {thing}.")).max_tokens(max_tokens).sampling(sampling)
}

/// A question whose answer does not end until it is cancelled.
fn endless(thing: &str) -> ChatRequest {
    let mut request = question(thing, 1_000_000, 1);
    request.options.ignore_end = true;
    request
}

/// Waits until an answer has begun.
fn begin(stream: &mut ReplyStream) {
    let begun = stream.any(|event| matches!(event.unwrap(), ReplyEvent::Content { .. }));
    assert!(begun, "it has text");
}

fn tool(name: &str) -> Value {
    let parameters = json!({
        "type": "object",
        "properties": { "count": { "type": "integer", "minimum": 0, "maximum": 9 } },
        "required": ["count"],
        "additionalProperties": false,
    });
    json!({ "type": "function", "function": { "name": name, "parameters": parameters } })
}

/// An observer that records the driver's work.
#[derive(Default)]
struct Witness {
    seen: Mutex<Seen>,
    changed: Condvar,
    tokens: AtomicUsize,
}

#[derive(Clone, Copy, Default)]
struct Seen {
    rests: bool,
    ending: Option<Ending>,
}

impl Witness {
    fn change(&self, change: impl FnOnce(&mut Seen)) {
        change(&mut self.seen.lock().unwrap());
        self.changed.notify_all();
    }

    #[track_caller]
    fn wait(&self, what: impl Fn(&Seen) -> bool) {
        let seen = self.seen.lock().unwrap();
        let (seen, waited) = self.changed.wait_timeout_while(seen, LIMIT, |seen| !what(seen)).unwrap();
        drop(seen);
        assert!(!waited.timed_out());
    }
}

impl Observer for Witness {
    fn rests(&self) {
        self.change(|seen| seen.rests = true);
    }

    fn begins_step(&self) {
        self.change(|seen| seen.rests = false);
    }

    fn ends_step(&self, _: Duration, tokens: usize) {
        self.tokens.fetch_add(tokens, Ordering::Relaxed);
    }

    fn ends(&self, ending: Ending) {
        self.change(|seen| seen.ending = Some(ending));
    }
}

fn observed(engine: &Engine) -> (Driver, Arc<Witness>) {
    let witness = Arc::new(Witness::default());
    let mut options = DriverOptions::new(4);
    options.observer = Some(witness.clone());
    (Driver::start(engine, options).unwrap(), witness)
}

fn held(engine: &Engine, purpose: Purpose) -> u64 {
    let of = |entry: &MemoryEntry| entry.purpose == purpose;
    engine.memory().iter().filter(|entry| of(entry)).map(|entry| entry.bytes).sum()
}

#[test]
fn answers_to_many_threads_are_those_of_a_session_alone() {
    let engine = engine();
    let (driver, witness) = observed(&engine);
    let things = ["a cat", "a boat", "the sea", "two dogs", "rain", "bread", "a king", "a mouse"];
    let written: usize = std::thread::scope(|scope| {
        let ask = |(i, thing)| {
            let (driver, engine) = (driver.clone(), &engine);
            scope.spawn(move || {
                let request = question(thing, 6 + 3 * i, i as u64);
                let reply = driver.chat(request.clone()).unwrap().whole().unwrap();
                let alone = driver.prompter().chat(request).unwrap();
                let alone = engine.session().reply(&alone, &mut |_| {}).unwrap();
                assert_eq!(reply.answer.tokens, alone.answer.tokens, "{thing}");
                assert_eq!((&reply.content, &reply.reasoning), (&alone.content, &alone.reasoning), "{thing}");
                assert_eq!(reply.content, reply.answer.text);
                reply.answer.tokens.len()
            })
        };
        let threads: Vec<_> = things.into_iter().enumerate().map(ask).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    driver.close();
    driver.join();
    witness.wait(|seen| seen.ending == Some(Ending::Asked));
    assert_eq!(witness.tokens.load(Ordering::Relaxed), written, "all tokens are told");
}

#[test]
fn what_is_told_as_it_comes_is_the_whole() {
    let engine = engine();
    let driver = start(&engine);
    let mut request = question("a tree", 12, 3);
    request.options.logprobs = Some(2);
    let whole = driver.chat(request.clone()).unwrap().whole().unwrap();
    let (mut text, mut scored, mut read, mut end) = (String::new(), Vec::new(), 0, None);
    for event in driver.chat(request).unwrap() {
        assert!(end.is_none(), "nothing comes after the end");
        match event.unwrap() {
            ReplyEvent::Start(meter) => assert!(meter.read().total > 0),
            ReplyEvent::Progress { done, total } => read = done * usize::from(done == total),
            ReplyEvent::Content { text: more, scored: mut likely } => {
                text.push_str(&more);
                scored.append(&mut likely);
            }
            ReplyEvent::End(answer) => end = Some(answer),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((&text, &scored), (&whole.content, &whole.scored));
    assert_eq!(scored.len(), 12);
    let end = end.expect("it has ended");
    assert_eq!(read, end.stats.prompt_tokens - end.stats.reused_tokens);
    assert_eq!((end.tokens, end.finish_reason), (whole.answer.tokens, FinishReason::Length));
}

#[test]
fn an_answer_whose_handle_is_dropped_ends_and_gives_its_memory_back() {
    let engine = engine();
    let before = held(&engine, Purpose::Conversations);
    let (driver, witness) = observed(&engine);
    let mut stream = driver.chat(endless("a cat")).unwrap();
    begin(&mut stream);
    assert!(held(&engine, Purpose::Conversations) > before);
    let mut other = driver.chat(question("a boat", 30, 2)).unwrap();
    begin(&mut other);
    drop(stream);
    assert_eq!(other.whole().unwrap().answer.finish_reason, FinishReason::Length, "others go on");
    witness.wait(|seen| seen.rests);
    assert_eq!(held(&engine, Purpose::Conversations), before);
    // The same with a callback and a ticket.
    let question = driver.prompter().chat(endless("a dog")).unwrap();
    let (sender, told) = mpsc::channel();
    let ticket = driver.ask_telling(question, move |event| drop(sender.send(event))).unwrap();
    while !matches!(told.recv_timeout(LIMIT).unwrap().unwrap(), ReplyEvent::Content { .. }) {}
    drop(ticket);
    let ended = told.iter().last().unwrap().unwrap();
    assert!(matches!(ended, ReplyEvent::End(answer) if answer.finish_reason == FinishReason::Cancelled));
}

#[test]
fn an_answer_that_is_cancelled_is_what_has_come_of_it() {
    let engine = engine();
    let driver = start(&engine);
    let mut stream = driver.chat(endless("the moon")).unwrap();
    begin(&mut stream);
    stream.cancel();
    let reply = stream.whole().unwrap();
    assert_eq!(reply.answer.finish_reason, FinishReason::Cancelled);
    assert!(!reply.answer.tokens.is_empty());
}

#[test]
fn all_end_when_the_last_handle_of_the_driver_is_dropped() {
    let engine = engine();
    let before = held(&engine, Purpose::Conversations);
    let (driver, witness) = observed(&engine);
    // More than are answered at once.
    let mut streams: Vec<_> = (0..6).map(|_| driver.chat(endless("a cat")).unwrap()).collect();
    begin(&mut streams[0]);
    let other = driver.clone();
    drop(driver);
    assert!(streams[0].next().unwrap().is_ok(), "there is another handle");
    drop(other);
    for stream in streams {
        assert!(matches!(stream.last().unwrap(), Err(Error::Cancelled)));
    }
    witness.wait(|seen| seen.ending == Some(Ending::Asked));
    assert_eq!(held(&engine, Purpose::Conversations), before);
}

#[test]
fn a_driver_that_is_closed_answers_what_was_asked() {
    let engine = engine();
    let driver = start(&engine);
    let streams: Vec<_> = (0..6).map(|i| driver.chat(question("a king", 8, i)).unwrap()).collect();
    driver.close();
    assert!(matches!(driver.chat(question("a mouse", 1, 1)), Err(Error::Cancelled)));
    driver.join();
    for stream in streams {
        assert!(!stream.whole().unwrap().answer.tokens.is_empty());
    }
}

#[test]
fn a_panic_of_who_listens_ends_all_and_is_told() {
    let engine = engine();
    let (driver, witness) = observed(&engine);
    let mut other = driver.chat(endless("a cat")).unwrap();
    begin(&mut other);
    let question = driver.prompter().chat(question("a boat", 4, 1)).unwrap();
    let _ticket = driver.ask_telling(question.clone(), |_| panic!("as the test wants it")).unwrap();
    let error = other.last().unwrap().unwrap_err();
    assert!(matches!(&error, Error::Backend(message) if message.contains("bug")), "{error}");
    witness.wait(|seen| seen.ending == Some(Ending::Panicked));
    assert!(matches!(driver.ask(question).err(), Some(Error::Backend(_))), "nothing is answered any more");
}

/// What two replies to the same question must have in common.
fn calls(reply: &Reply) -> Vec<(&str, Value)> {
    let arguments = |text: &str| serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"));
    reply.calls.iter().map(|call| (call.name.as_str(), arguments(&call.arguments))).collect()
}

#[test]
fn calls_of_tools_come_in_pieces_and_end_the_answer() {
    let (engine, prompter) = with_tools();
    let mut options = DriverOptions::new(4);
    options.prompter = Some(prompter);
    let driver = Driver::start(&engine, options).unwrap();
    let tools = vec![tool("take"), tool("leave")];
    let request =
        question("balls", 200, 5).tools(tools.clone()).tool_choice(ToolChoice::Named("leave".into()));
    let mut one = request.clone();
    one.parallel_tool_calls = false;
    let reply = driver.chat(one).unwrap().whole().unwrap();
    assert_eq!(reply.answer.finish_reason, FinishReason::Calls);
    let [(name, arguments)] = &calls(&reply)[..] else { panic!("{reply:?}") };
    assert_eq!(*name, "leave");
    assert!(arguments["count"].as_u64().unwrap() < 10);
    // The reply can be used as a message, and its call has an id.
    let message = reply.message();
    assert_eq!((message.role.as_str(), &message.content), ("assistant", &Some(Value::Null)));
    assert_eq!(message.extra["tool_calls"][0]["id"], reply.calls[0].id);
    let mut result = Message::new("tool", "Left.");
    result.extra.insert("tool_call_id".into(), reply.calls[0].id.as_str().into());
    let mut next = question("balls", 4, 5).tools(tools);
    next.messages.extend([message, result]);
    assert!(!driver.chat(next).unwrap().whole().unwrap().answer.tokens.is_empty());
    // A call is named before its arguments.
    let events: Vec<_> = driver.chat(request).unwrap().map(Result::unwrap).collect();
    let begins = events.iter().position(|event| matches!(event, ReplyEvent::Call { .. })).unwrap();
    let argues = events.iter().position(|event| matches!(event, ReplyEvent::Arguments(_))).unwrap();
    assert!(begins < argues);
}

#[test]
fn answers_have_the_form_that_was_asked_for() {
    let (engine, prompter) = with_tools();
    let mut options = DriverOptions::new(4);
    options.prompter = Some(prompter);
    let driver = Driver::start(&engine, options).unwrap();
    let schema = tool("x")["function"]["parameters"].clone();
    let ask = |format: Format| question("balls", 300, 7).format(format);
    let whole = |request: ChatRequest| driver.chat(request).unwrap().whole().unwrap();
    for request in
        [ask(Format::JsonSchema(schema.clone())), ask(Format::JsonSchema(schema.clone())).think(true)]
    {
        let mut request = request;
        request.options.reasoning = Some(5);
        let thinks = request.think == Some(true);
        let reply = whole(request);
        let value: Value = serde_json::from_str(&reply.content).unwrap();
        assert!(value["count"].is_u64(), "{reply:?}");
        // Reasoning comes before the JSON, and is counted.
        assert_eq!(reply.answer.stats.reasoning_tokens > 0, thinks, "{reply:?}");
        assert_eq!(!reply.reasoning.is_empty(), thinks);
    }
    // The grammar covers the whole answer, so there is nothing else in it.
    let grammar = Grammar::json_schema(&engine, &schema).unwrap();
    let reply = whole(ask(Format::Grammar(grammar)).think(true));
    assert!(serde_json::from_str::<Value>(&reply.answer.text).unwrap()["count"].is_u64());
    assert_eq!((reply.reasoning.as_str(), &reply.content), ("", &reply.answer.text));
}

#[test]
fn what_is_wrong_with_a_request_is_known_before_it_is_asked() {
    let (engine, prompter) = with_tools();
    let refused = |request: ChatRequest| match prompter.chat(request).unwrap_err() {
        Error::Field { field, error } => (field, *error),
        other => panic!("{other}"),
    };
    let ask = || question("balls", 10, 1);
    let mut image = ask();
    image.messages[0].content = Some(json!([{ "type": "image_url", "image_url": {} }]));
    let mut answered = ask();
    answered.messages.push(Message::new("assistant", "Yes."));
    for (request, field) in [
        (ChatRequest::default(), "messages"),
        (answered, "messages"),
        (image, "messages[0].content"),
        (ask().tools(vec![json!({ "type": "web_search" })]), "tools[0].type"),
        (ask().tools(vec![json!({ "type": "function" })]), "tools[0].function.name"),
        (ask().tool_choice(ToolChoice::Required), "tool_choice"),
        (ask().tools(vec![tool("f")]).tool_choice(ToolChoice::Named("g".into())), "tool_choice"),
        (ask().format(Format::JsonSchema(json!({ "type": "nothing" }))), "response_format"),
        (ask().sampling(SamplingOverrides { top_p: Some(2.0), ..Default::default() }), "top_p"),
    ] {
        assert_eq!(refused(request).0, field);
    }
    // Refused before encoding, for which there would not be enough memory.
    let (field, error) = refused(ChatRequest::user("word ".repeat(5_000_000)));
    assert_eq!(field, "messages");
    assert!(matches!(error, Error::Context { limit, .. } if limit == engine.context()));
    assert_eq!(held(&engine, Purpose::Requests), 0);
    let tokens = vec![forebay_engine::TokenId(5); engine.context()];
    let full = prompter.text(tokens, Default::default()).unwrap_err();
    assert!(
        matches!(full, Error::Field { field, .. } if field == "prompt"),
        "there is no room for an answer"
    );
}

#[test]
fn a_text_is_continued_as_it_is() {
    let engine = engine();
    let driver = start(&engine);
    let mut options = ReplyOptions::default();
    options.max_tokens = Some(6);
    options.sampling.temperature = Some(0.0);
    let reply = driver.complete("Once upon a time", options).unwrap().whole().unwrap();
    assert_eq!((reply.answer.tokens.len(), &reply.content), (6, &reply.answer.text));
    let prompt = engine.tokenizer().encode("Once upon a time", Default::default()).unwrap();
    let mut request = Request::new(&engine, prompt).unwrap();
    (request.max_tokens, request.sampling.temperature) = (Some(6), 0.0);
    assert_eq!(engine.session().generate(&request, &mut |_| {}).unwrap().tokens, reply.answer.tokens);
}

#[test]
fn several_answers_to_a_question_differ_and_can_be_had_again() {
    let engine = engine();
    let driver = start(&engine);
    let question = driver.prompter().chat(question("a song", 12, 9)).unwrap();
    let ask = |number| driver.ask(question.nth(number)).unwrap().whole().unwrap().answer;
    let [first, second] = [ask(0), ask(1)];
    assert_ne!(first.tokens, second.tokens);
    assert_eq!((first.tokens, first.seed), (ask(0).tokens, 9));
    assert_eq!(second.tokens, ask(1).tokens);
}

#[test]
fn what_is_worth_keeping_is_written_when_nobody_asks() {
    let engine = engine();
    let folder = tempfile::tempdir().unwrap();
    let mut options = DriverOptions::new(2);
    let prefixes = PrefixOptions::new(&engine, Some(folder.path().into()));
    options.crowd.prefixes = Some(PrefixOptions { gain: 8, ..prefixes });
    options.idle = Duration::from_millis(1);
    let driver = Driver::start(&engine, options).unwrap();
    driver.chat(question("a cat and a dog who want to go to the sea", 8, 1)).unwrap().whole().unwrap();
    let start = Instant::now();
    let files = || std::fs::read_dir(folder.path()).unwrap().count();
    while files() == 0 {
        assert!(start.elapsed() < LIMIT, "nothing was written");
        std::thread::sleep(Duration::from_millis(2));
    }
}
