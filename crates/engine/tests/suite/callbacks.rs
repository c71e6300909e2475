//! The caller's code never runs while a batch is computed. So callbacks may do anything with the engine, and a session
//! can be opened, forked, saved and loaded at any time.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use forebay_engine::{
    Answer, Cancel, Crowd, CrowdOptions, Engine, Error, Event, Listener, Options, PromptMeter, Result,
    Session, TokenId, Turn,
};
use forebay_testing::assert_same_bits;

use crate::common::models::{data, random_tokens};
use crate::common::served::{alone, request};

/// Ends a test that hangs. No test takes this long.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a function on its own thread, and fails if it does not end.
fn ending(body: impl FnOnce() + Send + 'static) {
    let (ended, end) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        // The receiver is gone if the limit was exceeded.
        let _ = ended.send(());
    });
    match end.recv_timeout(LIMIT) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Ok(()) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    }
}

fn open() -> Engine {
    let options = Options::default().threads(2).chunk(16);
    Engine::open(&data("golden/qwen3moe.gguf"), &options).unwrap()
}

fn story(len: usize) -> Vec<TokenId> {
    random_tokens(len, 160, 31)
}

/// A session that others are forked from.
fn begun(engine: &Engine) -> Session {
    let mut session = engine.session();
    session.extend(&story(20)).unwrap();
    session
}

/// Opens, forks, saves and loads a session, without computing anything.
fn handle(session: &mut Session, folder: &Path) -> Session {
    let engine = session.engine().clone();
    assert!(engine.session().tokens().is_empty() && !engine.backend_name().is_empty());
    let fork = session.fork().unwrap();
    let path = folder.join("conversation");
    fork.save(&path).unwrap();
    let loaded = Session::load(&engine, &path).unwrap();
    assert_eq!(loaded.tokens(), session.tokens());
    assert_same_bits(loaded.logits(), session.logits(), "loaded");
    loaded
}

/// Does the same, and then computes with all of the sessions.
fn handle_and_compute(session: &mut Session, folder: &Path) {
    let mut loaded = handle(session, folder);
    loaded.push(TokenId(3)).unwrap();
    let mut fresh = session.engine().session();
    fresh.extend(loaded.tokens()).unwrap();
    assert_same_bits(loaded.logits(), fresh.logits(), "in a callback");
}

#[test]
fn anything_may_be_done_in_the_callbacks_of_an_answer() {
    ending(|| {
        let engine = open();
        let folder = tempfile::tempdir().unwrap();
        let request = request(&story(40), 12, 5);
        let expected = alone(&engine, &request);
        let mut other = begun(&engine);
        let (mut prompts, mut texts) = (0, 0);
        let answer = engine.session().generate(&request, &mut |event| {
            match event {
                Event::Start(_) | Event::Prompt { .. } => prompts += 1,
                Event::Text(_) | Event::Token(_) => texts += 1,
            }
            handle_and_compute(&mut other, folder.path());
        });
        assert_eq!(answer.unwrap().tokens, expected.tokens);
        assert!(prompts == 4 && texts > 0, "{prompts}, {texts}");
    });
}

#[test]
fn anything_may_be_done_where_routers_are_watched() {
    ending(|| {
        let engine = open();
        let folder = tempfile::tempdir().unwrap();
        let request = request(&story(40), 4, 6);
        let expected = alone(&engine, &request);
        let mut other = begun(&engine);
        let told = Arc::new(AtomicUsize::new(0));
        let count = told.clone();
        let mut session = engine.session();
        let place = folder.path().to_owned();
        session.watch_routing(Some(Box::new(move |routed| {
            assert!(!routed.routing.experts().is_empty());
            count.fetch_add(1, Ordering::Relaxed);
            handle_and_compute(&mut other, &place);
        })));
        assert_eq!(session.generate(&request, &mut |_| {}).unwrap().tokens, expected.tokens);
        let layers = engine.routed_layers().len();
        assert_eq!(told.load(Ordering::Relaxed), (3 + 3) * layers, "three chunks and three tokens");
        // A cancelled batch reports the choices that it made.
        let asked = AtomicUsize::new(0);
        session.obey(&Cancel::when(move || asked.fetch_add(1, Ordering::Relaxed) == 1));
        assert!(matches!(session.push(TokenId(1)), Err(Error::Cancelled)));
        assert_eq!(told.load(Ordering::Relaxed), (3 + 3) * layers + 1);
    });
}

/// While a step holds the logits, everything that wants to compute waits. Everything else does not.
#[test]
fn conversations_are_opened_forked_saved_and_loaded_while_a_batch_is_held() {
    ending(|| {
        let engine = open();
        let folder = tempfile::tempdir().unwrap();
        let mut other = begun(&engine);
        let mut session = engine.session();
        let tokens = story(5);
        let mut turns = [Turn { session: &mut session, tokens: &tokens, logits: true, marks: &[] }];
        let mut step = engine.step(&mut turns, &Cancel::default()).unwrap();
        let (_, mut logits) = step.next_row().unwrap().unwrap();
        let before = logits.all().unwrap().to_vec();
        drop(handle(&mut other, folder.path()));
        std::thread::scope(|scope| {
            scope.spawn(|| drop(handle(&mut other, folder.path())));
        });
        assert_same_bits(logits.all().unwrap(), &before, "nothing else was computed");
        step.finish().unwrap();
        assert_eq!(session.tokens(), tokens);

        let text = story(40);
        let mut rows = engine.all_logits(&mut session, &text).unwrap();
        while rows.next_row().unwrap().is_some_and(|(position, _)| position < 20) {}
        drop(handle(&mut other, folder.path()));
        drop(rows);
        assert_eq!(session.tokens(), &text[..16], "whole chunks");
    });
}

#[test]
fn conversations_are_handled_by_some_threads_while_others_compute() {
    ending(|| {
        let engine = open();
        let request = request(&story(40), 12, 7);
        let expected = alone(&engine, &request);
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let computing = [(); 2].map(|()| {
                scope.spawn(|| {
                    for _ in 0..4 {
                        assert_eq!(alone(&engine, &request).tokens, expected.tokens);
                    }
                })
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let folder = tempfile::tempdir().unwrap();
                    let mut session = begun(&engine);
                    while !ended.load(Ordering::Relaxed) {
                        handle_and_compute(&mut session, folder.path());
                    }
                });
            }
            let results = computing.map(|thread| thread.join());
            ended.store(true, Ordering::Relaxed);
            results.into_iter().for_each(|result| result.unwrap());
        });
    });
}

/// A listener that does everything at every event.
struct Busy {
    other: Session,
    folder: tempfile::TempDir,
    answers: mpsc::Sender<Result<Answer>>,
}

impl Listener for Busy {
    fn event(&mut self, _: Event<'_>) {
        handle_and_compute(&mut self.other, self.folder.path());
    }

    fn end(mut self: Box<Self>, answer: Result<Answer>) {
        handle_and_compute(&mut self.other, self.folder.path());
        self.answers.send(answer).unwrap();
    }
}

#[test]
fn anything_may_be_done_by_those_who_listen_to_a_crowd() {
    ending(|| {
        let engine = open();
        let request = request(&story(30), 6, 8);
        let expected = alone(&engine, &request);
        let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
        let (answers, came) = mpsc::channel();
        for _ in 0..3 {
            let folder = tempfile::tempdir().unwrap();
            let busy = Busy { other: begun(&engine), folder, answers: answers.clone() };
            crowd.add(request.clone(), Cancel::default(), Box::new(busy));
        }
        while !crowd.is_empty() {
            crowd.step(&Cancel::default()).unwrap();
        }
        let answers: Vec<_> = came.try_iter().map(|answer| answer.unwrap().tokens).collect();
        assert_eq!(answers, [&expected.tokens; 3].map(Clone::clone));
    });
}

/// Takes the meter of a request.
struct Metering(Arc<Mutex<Vec<PromptMeter>>>);

impl Listener for Metering {
    fn event(&mut self, event: Event<'_>) {
        if let Event::Start(meter) = event {
            self.0.lock().unwrap().push(meter.clone());
        }
    }

    fn end(self: Box<Self>, answer: Result<Answer>) {
        answer.unwrap();
    }
}

/// What is asked between layers stands for another thread that reads meters while a batch is computed.
#[test]
fn the_meters_of_all_prompts_advance_with_each_layer() {
    ending(|| {
        let engine = open();
        let layers = engine.routed_layers().len();
        let mut crowd = Crowd::new(&engine, CrowdOptions::new(2));
        let meters = Arc::new(Mutex::new(Vec::new()));
        // Neither begins like the other, so neither waits for what the other has computed.
        for prompt in [story(20), random_tokens(44, 160, 32)] {
            crowd.add(request(&prompt, 2, 9), Cancel::default(), Box::new(Metering(meters.clone())));
        }
        let shown = Arc::new(Mutex::new(Vec::new()));
        let look = {
            let (meters, shown) = (meters.clone(), shown.clone());
            Cancel::when(move || {
                if let [first, second] = &meters.lock().unwrap()[..] {
                    shown.lock().unwrap().push((first.read().done, second.read().done));
                }
                false
            })
        };
        while !crowd.is_empty() {
            crowd.step(&look).unwrap();
        }
        let (meters, shown) = (meters.lock().unwrap(), shown.lock().unwrap());
        assert!(shown.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1), "{shown:?}");
        // A pass takes 16 tokens: eight of each prompt, later more of the longer one.
        for layer in 0..layers {
            let done = 8.0 * layer as f64 / layers as f64;
            assert!(shown.contains(&(done, done)), "{done} of both prompts: {shown:?}");
        }
        let read = |meter: &PromptMeter| (meter.read().done, meter.read().total);
        assert_eq!(meters.iter().map(read).collect::<Vec<_>>(), [(20.0, 20), (44.0, 44)]);
    });
}

#[test]
fn a_meter_shows_what_a_cancelled_prompt_kept_and_goes_on_from_there() {
    ending(|| {
        let engine = open();
        let text = story(40);
        let mut session = engine.session();
        session.extend(&text[..4]).unwrap();
        let (asked, layers) = (AtomicUsize::new(0), engine.routed_layers().len());
        session.obey(&Cancel::when(move || asked.fetch_add(1, Ordering::Relaxed) == layers + 1));
        let mut meter = None;
        let result = session.extend_watched(&text, &mut |started| meter = Some(started.clone()));
        assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
        let progress = meter.unwrap().read();
        let part = 16.0 / layers as f64;
        assert_eq!((progress.done, progress.total), (16.0 + part, 36), "of the second chunk one layer");
        assert_eq!(session.tokens().len(), 20);
        session.obey(&Cancel::default());
        let mut meter = None;
        session.extend_watched(&text, &mut |started| meter = Some(started.clone())).unwrap();
        let progress = meter.unwrap().read();
        assert_eq!((progress.done, progress.total, progress.time_left()), (20.0, 20, Some(Duration::ZERO)));
    });
}

#[test]
fn loading_ends_where_it_is_cancelled() {
    let model = data("golden/qwen3moe.gguf");
    let load = |most: usize| {
        let (cancel, calls) = (Cancel::default(), Arc::new(AtomicUsize::new(0)));
        let (stop, count) = (cancel.clone(), Arc::clone(&calls));
        let report = Arc::new(move |_, _| {
            if count.fetch_add(1, Ordering::Relaxed) + 1 == most {
                stop.cancel();
            }
        });
        let options = Options::new().threads(1).cancel(&cancel).progress(Some(report));
        let loaded = Engine::open(&model, &options);
        (loaded, calls.load(Ordering::Relaxed))
    };
    let (loaded, all) = load(usize::MAX);
    loaded.unwrap();
    // Among the dense weights, and among the experts.
    for place in [1, 3, all - 2] {
        let (loaded, calls) = load(place);
        assert!(matches!(loaded.err(), Some(Error::Cancelled)));
        assert_eq!(calls, place);
    }
}
