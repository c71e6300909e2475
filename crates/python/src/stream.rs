//! Answers in progress, as Python reads them.

use std::collections::VecDeque;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use forebay_engine::conversation::Draft;
use forebay_engine::driver::Ticket;
use forebay_engine::{Cancel, Engine, Error, PromptMeter, Question, ReplyEvent, Result};
use pyo3::prelude::*;

use crate::errors::exception;
use crate::model::{Core, Open};
use crate::values;
use crate::waiting::LOOK;

/// An answer in progress. Dropping it cancels the answer.
#[pyclass(frozen, module = "forebay._native")]
pub struct Stream {
    inbox: Arc<Inbox>,
    messenger: Messenger,
    /// The model lives as long as its answers.
    _model: Arc<Core>,
}

/// The events of an answer that nobody has read yet.
#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    events: VecDeque<Result<ReplyEvent>>,
    /// Collects what was read.
    draft: Draft,
    /// How much of the prompt is processed.
    meter: Option<PromptMeter>,
    /// Cancels the answer when it is dropped.
    ticket: Option<Ticket>,
    /// Whether the last event was read, or the stream was closed.
    ended: bool,
    waker: Option<Waker>,
}

/// The next event of an inbox.
enum Next {
    Event(Result<ReplyEvent>),
    /// It has not come yet.
    Later,
    /// There is none.
    Never,
}

impl Stream {
    /// Asks a model.
    ///
    /// # Errors
    /// As [`Driver::ask`](forebay_engine::Driver::ask).
    pub fn of(model: &Arc<Core>, open: &Open, question: Question) -> Result<Stream> {
        let inbox = Arc::new(Inbox::default());
        let (engine, leave) = (open.driver.engine().clone(), open.leave.clone());
        let mut teller = Teller { inbox: Arc::clone(&inbox), engine, leave, ended: false };
        let ticket = open.driver.ask_telling(question, move |event| teller.tell(event))?;
        inbox.lock().ticket = Some(ticket);
        Ok(Stream { inbox, messenger: open.messenger.clone(), _model: Arc::clone(model) })
    }
}

#[pymethods]
impl Stream {
    /// Waits for the next event. Events are tuples that begin with their kind.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        loop {
            if let Some(event) = self.poll(py)? {
                return Ok(event);
            }
            py.detach(|| self.inbox.wait());
            py.check_signals().inspect_err(|_| self.close())?;
        }
    }

    /// The next event, if it has come.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let event = match self.inbox.next() {
            Next::Event(event) => event.map_err(exception)?,
            Next::Later => return Ok(None),
            Next::Never => return values::closed(py).map(Some),
        };
        let told = values::event(py, &event)?;
        match self.inbox.lock().draft.take(event) {
            Some(reply) => values::end(py, reply).map(Some),
            None => Ok(told),
        }
    }

    /// Has a function called on another thread each time when there is something to poll.
    fn wake(&self, function: Py<PyAny>) {
        let waker = Waker::new(function, &self.messenger);
        let mut state = self.inbox.lock();
        if state.ended || !state.events.is_empty() {
            waker.wake();
        }
        state.waker = Some(waker);
    }

    /// Tokens of the prompt that are processed, and all that are to be processed; None before that has begun.
    #[getter]
    fn progress(&self) -> Option<(f64, usize)> {
        let progress = self.inbox.lock().meter.as_ref().map(PromptMeter::read)?;
        Some((progress.done, progress.total))
    }

    /// Cancels the answer. What was not read is dropped.
    fn close(&self) {
        self.inbox.close();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.inbox.close();
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, event: Result<ReplyEvent>) {
        let mut state = self.lock();
        match event {
            Ok(ReplyEvent::Start(meter)) => state.meter = Some(meter),
            // The meter says the same.
            Ok(ReplyEvent::Progress { .. }) => {}
            event if !state.ended => {
                state.events.push_back(event);
                self.notify(&state);
            }
            // The stream is closed.
            _ => {}
        }
    }

    fn notify(&self, state: &State) {
        self.changed.notify_all();
        state.waker.iter().for_each(Waker::wake);
    }

    fn next(&self) -> Next {
        let mut state = self.lock();
        match state.events.pop_front() {
            Some(event) => {
                state.ended = matches!(event, Err(_) | Ok(ReplyEvent::End(_)));
                Next::Event(event)
            }
            None if state.ended => Next::Never,
            None => Next::Later,
        }
    }

    /// Waits a moment for an event.
    fn wait(&self) {
        let state = self.lock();
        if state.events.is_empty() && !state.ended {
            drop(self.changed.wait_timeout(state, LOOK));
        }
    }

    fn close(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.events.clear();
        state.ticket = None;
        self.notify(&state);
    }
}

/// Puts the driver's events into an inbox.
struct Teller {
    inbox: Arc<Inbox>,
    engine: Engine,
    leave: Cancel,
    ended: bool,
}

impl Teller {
    fn tell(&mut self, event: Result<ReplyEvent>) {
        self.ended = matches!(event, Err(_) | Ok(ReplyEvent::End(_)));
        self.inbox.push(event);
    }
}

impl Drop for Teller {
    /// An answer has an end even if the driver's thread ended without answering it.
    fn drop(&mut self) {
        if !self.ended {
            self.inbox.push(Err(match self.engine.lost() {
                Some(why) => Error::DeviceLost(why.to_owned()),
                None if self.leave.is_cancelled() => Error::Cancelled,
                None => Error::Backend(
                    "the computing thread panicked, which is a bug: load the model again".into(),
                ),
            }));
        }
    }
}

/// Calls Python functions on a thread of its own, because the driver's thread must never wait for the interpreter.
/// Clones share the thread, which ends with the last one.
#[derive(Clone)]
pub struct Messenger(Sender<Arc<Py<PyAny>>>);

impl Messenger {
    /// # Errors
    /// If the thread cannot be started.
    pub fn start() -> Result<Messenger> {
        let (sender, functions) = channel::<Arc<Py<PyAny>>>();
        let run = move || {
            for function in functions {
                // An event loop that was closed refuses. Then nobody waits any more. The same is true when the
                // interpreter is gone.
                Python::try_attach(|py| drop(function.call0(py)));
            }
        };
        let thread = thread::Builder::new().name("forebay-messenger".into()).spawn(run);
        thread.map_err(|error| Error::Backend(format!("cannot start a thread: {error}")))?;
        Ok(Messenger(sender))
    }
}

/// Wakes whoever waits for an answer without blocking a thread.
#[derive(Clone)]
pub struct Waker {
    function: Arc<Py<PyAny>>,
    messenger: Messenger,
}

impl Waker {
    /// Calls this function.
    pub fn new(function: Py<PyAny>, messenger: &Messenger) -> Waker {
        Waker { function: Arc::new(function), messenger: messenger.clone() }
    }

    pub fn wake(&self) {
        // The thread ends after the last sender.
        let _ = self.messenger.0.send(Arc::clone(&self.function));
    }
}
