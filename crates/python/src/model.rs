//! A loaded model.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use forebay_engine::{
    Cancel, Driver, DriverOptions, Engine, Options, PrefixOptions, Prompter, Prospect, Result,
};
use forebay_server::openai::{Answers, Endpoint};
use pyo3::prelude::*;

use crate::errors::{check_process, exception, failure, hub_exception};
use crate::loading::{Arguments, Loading, load};
use crate::openai::OpenAi;
use crate::progress::Progress;
use crate::requests::{Asked, json};
use crate::server::{Means, Server, ServerArguments, Serving};
use crate::session::{Held, Session};
use crate::stages::transports;
use crate::stream::{Messenger, Stream};
use crate::tokenizer::Tokenizer;
use crate::values::{self, ExpertMeters, MemoryPlan};
use crate::waiting::wait;

/// A loaded model.
#[pyclass(frozen, module = "forebay._native")]
pub struct Model(Arc<Core>);

/// What a model and its sessions share.
pub struct Core {
    /// The process that loaded the model. A fork of it has none of the threads that compute.
    process: u32,
    /// `None` after the model was closed.
    open: Mutex<Option<Open>>,
}

/// What computes for a model.
#[derive(Clone)]
pub struct Open {
    pub driver: Driver,
    /// Cancels the driver.
    pub leave: Cancel,
    pub messenger: Messenger,
    parallel: usize,
    prefix_cache: bool,
    sessions: Arc<Mutex<Vec<Weak<Held>>>>,
    servers: Arc<Mutex<Vec<Weak<Serving>>>>,
}

impl Core {
    fn open(&self) -> PyResult<Open> {
        check_process(self.process)?;
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.clone().ok_or_else(|| failure("the model is closed: load it again"))
    }

    /// The engine.
    ///
    /// # Errors
    /// If the model is closed.
    pub fn engine(&self) -> PyResult<Engine> {
        Ok(self.open()?.driver.engine().clone())
    }

    /// Remembers a session, so that it ends with the model.
    ///
    /// # Errors
    /// If the model is closed.
    pub fn adopt(&self, session: &Arc<Held>) -> PyResult<()> {
        let open = self.open()?;
        let mut sessions = open.sessions.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|session| session.strong_count() > 0);
        sessions.push(Arc::downgrade(session));
        Ok(())
    }

    /// Ends what the model computes, and gives its memory back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Open { driver, sessions, servers, .. }) = open else { return Ok(()) };
        driver.leave();
        wait(py, &Cancel::default(), move || {
            let servers = std::mem::take(&mut *servers.lock().unwrap_or_else(PoisonError::into_inner));
            servers.iter().filter_map(Weak::upgrade).for_each(|server| server.close());
            driver.join();
            let sessions = std::mem::take(&mut *sessions.lock().unwrap_or_else(PoisonError::into_inner));
            sessions.iter().filter_map(Weak::upgrade).for_each(|session| session.close());
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        // A fork's handles refer to threads that it does not have.
        if self.process != std::process::id() {
            std::mem::forget(self.open.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

impl Model {
    fn ask(
        &self,
        py: Python<'_>,
        endpoint: Endpoint,
        body: &str,
        grammar: Option<String>,
    ) -> PyResult<Vec<Stream>> {
        let (model, open) = (Arc::clone(&self.0), self.0.open()?);
        let asked = Asked::read(endpoint, body, grammar).map_err(exception)?;
        let ask = move || -> Result<Vec<Stream>> {
            let questions = asked.questions(open.driver.prompter())?;
            let ask = |question| Stream::of(&model, &open, question);
            questions.into_iter().map(ask).collect()
        };
        wait(py, &Cancel::default(), ask)?.map_err(exception)
    }
}

#[pymethods]
impl Model {
    /// Loads a model, or the layers after those of `stages`. While it loads, `progress` is called with the bytes that are loaded, and all.
    /// `note` is called if the CPU computes instead of a GPU, with the reason.
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        stages: Option<Vec<Py<PyAny>>>,
        arguments: Arguments,
        progress: Bound<'_, PyAny>,
        note: Bound<'_, PyAny>,
    ) -> PyResult<Model> {
        let stages: Option<Vec<_>> = stages.map(|stages| stages.into_iter().map(Arc::new).collect());
        let open = move |options: &Options| match &stages {
            None => Engine::open(&path, options),
            Some(stages) => Engine::after(transports(stages), &path, options),
        };
        let open = load(py, arguments, &progress, &note, open, |engine, loading| start(&engine, loading))?;
        Ok(Model(Arc::new(Core { process: std::process::id(), open: Mutex::new(Some(open)) })))
    }

    /// Asks for the next message of a chat, with a body of OpenAI's API as JSON text, and perhaps a Lark grammar.
    #[pyo3(signature = (body, grammar=None))]
    fn chat(&self, py: Python<'_>, body: &str, grammar: Option<String>) -> PyResult<Stream> {
        let mut streams = self.ask(py, Endpoint::Chat, body, grammar)?;
        Ok(streams.remove(0))
    }

    /// Asks for the continuation of each prompt of such a body.
    #[pyo3(signature = (body, grammar=None))]
    fn complete(&self, py: Python<'_>, body: &str, grammar: Option<String>) -> PyResult<Vec<Stream>> {
        self.ask(py, Endpoint::Completions, body, grammar)
    }

    /// Answers such a body in the form of OpenAI's API.
    fn openai(&self, py: Python<'_>, model: String, body: &str) -> PyResult<OpenAi> {
        let open = self.0.open()?;
        let body = json(body).map_err(exception)?;
        let ask = move || Answers::ask(&open.driver, &model, Endpoint::Chat, body);
        Ok(OpenAi::of(wait(py, &Cancel::default(), ask)?.map_err(exception)?))
    }

    /// Starts a server, which answers requests with a thread of its own beside the model's: it divides its places among clients.
    fn serve(&self, arguments: ServerArguments) -> PyResult<Server> {
        let open = self.0.open()?;
        let means = Means {
            prompter: open.driver.prompter().clone(),
            parallel: open.parallel,
            prefix_cache: open.prefix_cache,
            messenger: open.messenger,
        };
        let (server, serving) = Server::start(arguments, means).map_err(exception)?;
        let mut servers = open.servers.lock().unwrap_or_else(PoisonError::into_inner);
        servers.retain(|server| server.strong_count() > 0);
        servers.push(Arc::downgrade(&serving));
        Ok(server)
    }

    /// An empty session.
    fn session(&self) -> PyResult<Session> {
        Session::of(&self.0, self.0.engine()?.session())
    }

    /// Reads a session from a file.
    fn load_session(&self, py: Python<'_>, path: PathBuf) -> PyResult<Session> {
        let engine = self.0.engine()?;
        let load = move || forebay_engine::Session::load(&engine, &path);
        Session::of(&self.0, wait(py, &Cancel::default(), load)?.map_err(exception)?)
    }

    /// The tokenizer.
    #[getter]
    fn tokenizer(&self) -> Tokenizer {
        Tokenizer::of(&self.0)
    }

    /// What the expert store has counted.
    fn meters(&self) -> PyResult<ExpertMeters> {
        Ok(ExpertMeters::of(&self.0.engine()?.meters()))
    }

    /// The memory in use: tier, purpose, bytes.
    fn memory(&self) -> PyResult<Vec<(&'static str, &'static str, u64)>> {
        Ok(values::memory(&self.0.engine()?))
    }

    /// How memory is divided.
    #[getter]
    fn plan(&self) -> PyResult<MemoryPlan> {
        Ok(MemoryPlan::of(self.0.engine()?.plan()))
    }

    /// The context length in tokens.
    #[getter]
    fn context(&self) -> PyResult<usize> {
        Ok(self.0.engine()?.context())
    }

    /// The number of logits.
    #[getter]
    fn vocab_size(&self) -> PyResult<usize> {
        Ok(self.0.engine()?.vocab_size())
    }

    /// What computes, in words.
    #[getter]
    fn backend(&self) -> PyResult<String> {
        Ok(self.0.engine()?.backend_name())
    }

    /// Whether the model was closed.
    #[getter]
    fn closed(&self) -> bool {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Ends all answers and sessions, and gives the memory back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.0.close(py)
    }
}

/// Starts what answers requests.
fn start(engine: &Engine, loading: &Loading) -> Result<Open> {
    let leave = Cancel::default();
    let mut options = DriverOptions::new(loading.parallel);
    options.leave = leave.clone();
    if loading.prefix_cache {
        options.crowd.prefixes = Some(PrefixOptions::new(engine, None));
    }
    options.prompter = Some(Prompter::new(engine).with_template(loading.template(engine)?));
    let (driver, messenger) = (Driver::start(engine, options)?, Messenger::start()?);
    let (sessions, servers) = (Arc::default(), Arc::default());
    let (parallel, prefix_cache) = (loading.parallel, loading.prefix_cache);
    Ok(Open { driver, leave, messenger, parallel, prefix_cache, sessions, servers })
}

/// How memory would be divided: the plan, the least memory that suffices, and the least that holds all experts. Of a model
/// of the hub that is not here only a few megabytes are downloaded.
#[pyfunction]
pub fn plan(
    py: Python<'_>,
    model: Option<PathBuf>,
    arguments: Arguments,
) -> PyResult<(MemoryPlan, u64, u64)> {
    let loading = Loading::new(arguments).map_err(exception)?;
    let asked = model.clone();
    let plan = move || -> forebay_hub::Result<_> {
        let sight = match &model {
            Some(model) => forebay_hub::sight(model, &Progress::default())?,
            None => forebay_hub::sight(&forebay_hub::demo()?, &Progress::default())?,
        };
        let planned = loading.device.load(
            loading.vram,
            |_| (),
            |device| {
                let options = loading.options.clone().device(device);
                let prospect = Prospect::new(&sight.path, &options)?;
                let (least, all) = (prospect.least_memory(&options)?, prospect.memory_for_all(&options)?);
                Ok((prospect.plan().clone(), least, all))
            },
        );
        Ok(planned?.0)
    };
    let planned = wait(py, &Cancel::default(), plan)?;
    let (plan, least, all) = planned.map_err(|error| hub_exception(error, asked.as_deref()))?;
    Ok((MemoryPlan::of(&plan), least, all))
}
