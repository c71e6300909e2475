//! Streamed answers in the form of OpenAI's API.

use forebay_engine::{Engine, FinishReason, PromptMeter, PromptProgress, ReplyEvent};
use serde_json::{Value, json};

use super::answer::{Envelope, Total, tell_measured};
use super::{Body, Endpoint, chat, completions};

/// How the client wants the answer.
pub struct Wants {
    pub stream: bool,
    usage: bool,
    progress: bool,
}

impl Wants {
    pub fn of(body: &Body) -> Wants {
        Wants {
            stream: body.stream == Some(true),
            usage: body.stream_options.as_ref().is_some_and(|options| options.include_usage == Some(true)),
            progress: body.return_progress == Some(true),
        }
    }
}

/// Converts the events of a streamed answer to chunks.
pub struct Chunks {
    pub(super) envelope: Envelope,
    wants: Wants,
    /// The engine, if the chunks have logprobs.
    pub(super) scorer: Option<Engine>,
    /// For each answer: in a chat the number of its calls so far, in a completion the position of its next token in characters.
    pub(super) counts: Vec<usize>,
    prompts: Prompts,
    total: Total,
}

impl Chunks {
    /// For so many answers.
    pub fn new(envelope: Envelope, wants: Wants, engine: &Engine, count: usize) -> Chunks {
        let scorer = envelope.form.is_scored.then(|| engine.clone());
        let (prompts, total) = (Prompts::default(), Total::default());
        Chunks { envelope, wants, scorer, counts: vec![0; count], prompts, total }
    }

    /// The first chunks. They are sent before anything is computed, so that the client knows that its request was accepted.
    pub fn start(&self) -> Vec<Value> {
        let first = |index| match self.envelope.form.endpoint {
            Endpoint::Chat => Some(chat::first(index)),
            Endpoint::Completions => completions::first(index, &self.envelope.form),
        };
        (0..self.counts.len()).filter_map(first).map(|choice| self.chunk(choice)).collect()
    }

    /// The chunks for an event.
    pub fn take(&mut self, index: usize, event: ReplyEvent) -> Vec<Value> {
        match event {
            ReplyEvent::Start(meter) => {
                self.prompts.watch(index, meter);
                self.news()
            }
            ReplyEvent::Progress { .. } => self.news(),
            ReplyEvent::End(answer) => {
                self.total.add(index, self.envelope.form.each, &answer.stats);
                let mut chunk = self.chunk(self.empty(index, Some(answer.finish_reason)));
                tell_measured(&answer.stats, &mut chunk);
                vec![chunk]
            }
            event => {
                let choice = match self.envelope.form.endpoint {
                    Endpoint::Chat => self.chat_choice(index, event),
                    Endpoint::Completions => self.text_choice(index, event),
                };
                choice.map(|choice| self.chunk(choice)).into_iter().collect()
            }
        }
    }

    /// Whether there may be [news](Self::news) without an event.
    pub fn has_news(&self) -> bool {
        self.wants.progress && !self.prompts.0.is_empty()
    }

    /// Chunks with the progress of prompts that have advanced, if the client wants them.
    pub fn news(&mut self) -> Vec<Value> {
        if !self.wants.progress {
            return Vec::new();
        }
        let news = self.prompts.news();
        let chunk = |(index, progress): (usize, PromptProgress)| {
            let mut chunk = self.chunk(self.empty(index, None));
            chunk["prompt_progress"] = json!({
                "processed": progress.done.floor() as u64,
                "total": progress.total,
                "seconds_left": progress.time_left().map(|left| left.as_secs_f64()),
            });
            chunk
        };
        news.into_iter().map(chunk).collect()
    }

    /// The chunk after the end of all answers, if the client wants it.
    pub fn end(&self) -> Option<Value> {
        self.wants.usage.then(|| {
            let mut chunk = self.envelope.with(json!([]));
            self.total.tell_usage(&mut chunk);
            self.total.tell_measured(&mut chunk);
            chunk
        })
    }

    /// A chunk of an answer.
    fn chunk(&self, choice: Value) -> Value {
        let mut chunk = self.envelope.with(json!([choice]));
        if self.wants.usage {
            // With `include_usage`, every chunk has the field; only the last one has a value.
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    /// A choice without text.
    fn empty(&self, index: usize, finish: Option<FinishReason>) -> Value {
        match self.envelope.form.endpoint {
            Endpoint::Chat => chat::choice(index, json!({}), Value::Null, finish),
            Endpoint::Completions => completions::choice(index, "", Value::Null, finish),
        }
    }
}

/// The prompts that are being processed: the index of the answer, the meter, and the tokens that were reported last.
#[derive(Default)]
struct Prompts(Vec<(usize, PromptMeter, Option<u64>)>);

impl Prompts {
    fn watch(&mut self, index: usize, meter: PromptMeter) {
        self.0.push((index, meter, None));
    }

    /// The prompts that have advanced since the last call. Complete ones are reported for the last time.
    fn news(&mut self) -> Vec<(usize, PromptProgress)> {
        let mut news = Vec::new();
        self.0.retain_mut(|(index, meter, told)| {
            let progress = meter.read();
            let done = Some(progress.done.floor() as u64);
            // A prompt that was displaced and starts again is reported when it is as far as before.
            if done > *told {
                *told = done;
                news.push((*index, progress));
            }
            progress.done < progress.total as f64
        });
        news
    }
}
