//! How a model is to be loaded, as Python says it.

use std::sync::Arc;

use forebay_devices::DeviceChoice;
use forebay_engine::chat::ChatTemplate;
use forebay_engine::{Bytes, Cancel, Engine, Error, ExpertMemory, Options, PolicyKind, Precision, Result};
use pyo3::prelude::*;

use crate::errors::{exception, in_arguments};
use crate::progress::Progress;
use crate::waiting::wait_looking;

/// The arguments of `Model`, `Stage` and `plan`, in a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub struct Arguments {
    memory: Option<Size>,
    expert_memory: Option<Size>,
    context: Option<usize>,
    device: String,
    vram: Option<Size>,
    cpu_experts: bool,
    threads: Option<usize>,
    exact: bool,
    io: String,
    policy: String,
    prefetch: bool,
    heat: bool,
    parallel: usize,
    prefix_cache: bool,
    chat_template: Option<String>,
}

/// A number of bytes, or a text such as 8G.
#[derive(FromPyObject)]
pub enum Size {
    Bytes(u64),
    Text(String),
}

impl Size {
    /// The number of bytes.
    ///
    /// # Errors
    /// If the text says no number of bytes.
    pub fn bytes(&self) -> Result<u64> {
        match self {
            Size::Bytes(bytes) => Ok(*bytes),
            Size::Text(text) => text.parse().map(|Bytes(bytes)| bytes),
        }
    }

    fn memory(&self) -> Result<u64> {
        let text = match self {
            Size::Bytes(bytes) => &bytes.to_string(),
            Size::Text(text) => text,
        };
        Bytes::of_memory(text).map(|bytes| bytes.0)
    }

    fn expert_memory(&self) -> Result<ExpertMemory> {
        match self {
            Size::Bytes(_) => self.memory().map(ExpertMemory::Bytes),
            Size::Text(text) => text.parse(),
        }
    }
}

/// How a model is to be loaded.
pub struct Loading {
    pub device: DeviceChoice,
    /// Bytes of the GPU's memory.
    pub vram: Option<u64>,
    /// The most answers at once.
    pub parallel: usize,
    pub prefix_cache: bool,
    /// For the engine. The device is not among them.
    pub options: Options,
    template: Option<String>,
}

impl Loading {
    /// # Errors
    /// If an argument has a value that is not possible; the error names it.
    pub fn new(arguments: Arguments) -> Result<Loading> {
        let about = |name: &'static str| move |error| Error::about(name, error);
        let memory =
            |name, size: &Option<Size>| size.as_ref().map(Size::memory).transpose().map_err(about(name));
        let policy = PolicyKind::parse(&arguments.policy).ok_or_else(|| {
            let known = PolicyKind::ALL.map(PolicyKind::name).join(", ");
            Error::field("policy", format!("{:?} is not a policy; there are {known}", arguments.policy))
        })?;
        if arguments.parallel == 0 {
            return Err(Error::field("parallel", "use at least 1"));
        }
        let experts = arguments.expert_memory.as_ref().map(Size::expert_memory).transpose();
        let options = Options::new()
            .memory(memory("memory", &arguments.memory)?)
            .expert_memory(experts.map_err(about("expert_memory"))?)
            .context(arguments.context)
            .cpu_experts(arguments.cpu_experts)
            .threads(arguments.threads)
            .precision(if arguments.exact { Precision::Exact } else { Precision::Fast })
            .io(arguments.io.parse().map_err(about("io"))?)
            .policy(policy)
            .prefetch(arguments.prefetch)
            .heat(if arguments.heat { forebay_hub::cache_folder("heat") } else { None });
        Ok(Loading {
            device: arguments.device.parse().map_err(about("device"))?,
            vram: memory("vram", &arguments.vram)?,
            parallel: arguments.parallel,
            prefix_cache: arguments.prefix_cache,
            options,
            template: arguments.chat_template,
        })
    }

    /// The chat template that replaces the model's.
    ///
    /// # Errors
    /// If it is not a template.
    pub fn template(&self, engine: &Engine) -> Result<Option<Arc<ChatTemplate>>> {
        let template =
            self.template.as_ref().map(|source| ChatTemplate::of_source(source, engine.tokenizer()));
        let template = template.transpose().map_err(|error| Error::about("chat_template", error))?;
        Ok(template.map(Arc::new))
    }
}

/// Loads something on the device that the arguments choose, and finishes it. While it loads, `progress` is called with the
/// bytes that are loaded, and all. `note` is called if the CPU computes instead of a GPU, with the reason.
pub fn load<T, R: Send + 'static>(
    py: Python<'_>,
    arguments: Arguments,
    progress: &Bound<'_, PyAny>,
    note: &Bound<'_, PyAny>,
    open: impl Fn(&Options) -> Result<T> + Send + 'static,
    finish: impl FnOnce(T, &Loading) -> Result<R> + Send + 'static,
) -> PyResult<R> {
    let loading = Loading::new(arguments).map_err(exception)?;
    let cancel = Cancel::default();
    let bytes = Progress::default();
    let told = bytes.clone();
    let report = Arc::new(move |done, total| told.set(done, total));
    let options = loading.options.clone().cancel(&cancel).progress(Some(report));
    let work = move || {
        let mut notes = Vec::new();
        let open = |device| open(&options.clone().device(device));
        let (opened, _) = loading.device.load(loading.vram, |note| notes.push(note), open)?;
        Ok((finish(opened, &loading)?, notes))
    };
    let (finished, notes) = wait_looking(py, &cancel, work, |_| bytes.tell(progress))?.map_err(exception)?;
    for text in notes {
        note.call1((in_arguments(&text),))?;
    }
    Ok(finished)
}
