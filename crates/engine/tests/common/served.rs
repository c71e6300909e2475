//! Sends requests to a crowd and records their events.

use std::sync::{Arc, Mutex};

use forebay_engine::internals::generate::sampler::SamplingParams;
use forebay_engine::{Answer, Cancel, Crowd, Engine, Event, Listener, Request, Result, TokenId};

/// The events of a request.
#[derive(Default)]
pub struct Heard {
    pub text: String,
    /// Prompt progress: tokens computed, and the total.
    pub progress: Vec<(usize, usize)>,
    pub answer: Option<Result<Answer>>,
}

#[derive(Clone, Default)]
pub struct Ear(Arc<Mutex<Heard>>);

impl Listener for Ear {
    fn event(&mut self, event: Event<'_>) {
        let mut heard = self.0.lock().unwrap();
        assert!(heard.answer.is_none(), "nothing comes after the end");
        match event {
            Event::Prompt { done, total } => heard.progress.push((done, total)),
            Event::Text(text) => heard.text.push_str(text),
            Event::Start(_) | Event::Token(_) => {}
        }
    }

    fn end(self: Box<Self>, answer: Result<Answer>) {
        let before = self.0.lock().unwrap().answer.replace(answer);
        assert!(before.is_none(), "it ends once");
    }
}

impl Ear {
    pub fn has_ended(&self) -> bool {
        self.0.lock().unwrap().answer.is_some()
    }

    pub fn text(&self) -> String {
        self.0.lock().unwrap().text.clone()
    }

    pub fn progress(&self) -> Vec<(usize, usize)> {
        self.0.lock().unwrap().progress.clone()
    }

    /// The answer. Asserts that its text equals the events' text.
    pub fn answer(&self) -> Answer {
        let mut heard = self.0.lock().unwrap();
        let answer = heard.answer.take().expect("it has ended").unwrap();
        assert_eq!(answer.text, heard.text, "what was heard is the answer");
        answer
    }

    pub fn error(&self) -> forebay_engine::Error {
        self.0.lock().unwrap().answer.take().expect("it has ended").unwrap_err()
    }
}

/// A request with its own seed that ends after `max_tokens` tokens.
pub fn request(prompt: &[TokenId], max_tokens: usize, seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 1.0, seed: Some(seed), ..SamplingParams::default() };
    Request::default().prompt(prompt.to_vec()).max_tokens(max_tokens).sampling(sampling).ignore_end(true)
}

/// The answer of a new session.
pub fn alone(engine: &Engine, request: &Request) -> Answer {
    engine.session().generate(request, &mut |_| {}).unwrap()
}

/// Adds a request that is never cancelled.
pub fn add(crowd: &mut Crowd, request: &Request) -> Ear {
    let ear = Ear::default();
    crowd.add(request.clone(), Cancel::default(), Box::new(ear.clone()));
    ear
}

/// After this many steps that compute nothing, nothing ever will be: no file of a test takes so long to read.
const MOST_IDLE: u64 = 1000;

/// Takes steps until all requests are answered.
pub fn finish(crowd: &mut Crowd) {
    let idle = crowd.idle_steps();
    for _ in 0..100_000 {
        if crowd.is_empty() {
            return;
        }
        if crowd.idle_steps() - idle > MOST_IDLE {
            break;
        }
        crowd.step(&Cancel::default()).unwrap();
    }
    panic!("{} run and {} wait for ever", crowd.running(), crowd.waiting());
}

/// Adds a request that can be cancelled.
pub fn add_leaving(crowd: &mut Crowd, request: &Request) -> (Cancel, Ear) {
    let (cancel, ear) = (Cancel::default(), Ear::default());
    crowd.add(request.clone(), cancel.clone(), Box::new(ear.clone()));
    (cancel, ear)
}

/// The answer to one request alone in a crowd.
pub fn ask(crowd: &mut Crowd, request: &Request) -> Answer {
    let ear = add(crowd, request);
    finish(crowd);
    ear.answer()
}

/// Asserts that both answers are the same, except for their measurements.
pub fn assert_same(a: &Answer, b: &Answer, what: &str) {
    assert_eq!(a.tokens, b.tokens, "{what}");
    assert_eq!((&a.text, a.finish_reason), (&b.text, b.finish_reason), "{what}");
}
