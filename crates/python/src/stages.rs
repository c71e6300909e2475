//! Models that are split by layers: stages, and the transports that a model reaches them through.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_engine::{Cancel, Lost, Options, Prospect, StageHost, Transport};
use pyo3::exceptions::{PyException, PyKeyboardInterrupt};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{check_process, failure, hub_exception};
use crate::loading::{Arguments, load};
use crate::progress::Progress;
use crate::values::{ExpertMeters, MemoryPlan};
use crate::waiting::wait;

/// Some layers of a model, without the last one.
#[pyclass(frozen, module = "forebay._native")]
pub struct Stage {
    /// The process that loaded the stage. A fork of it has none of the threads that compute.
    process: u32,
    /// `None` after the stage was closed.
    open: Mutex<Option<Open>>,
}

#[derive(Clone)]
struct Open {
    stage: forebay_engine::Stage,
    /// It is taken out when the stage is closed, so that a call in progress does not keep it.
    host: Arc<Mutex<Option<StageHost>>>,
}

impl Stage {
    fn open(&self) -> PyResult<Open> {
        check_process(self.process)?;
        lock(&self.open).clone().ok_or_else(closed)
    }
}

#[pymethods]
impl Stage {
    /// Loads these layers of a model: from the first one to before the second one. The rest is as for `Model`.
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        layers: (usize, usize),
        arguments: Arguments,
        progress: Bound<'_, PyAny>,
        note: Bound<'_, PyAny>,
    ) -> PyResult<Stage> {
        let open = move |options: &Options| {
            forebay_engine::Stage::open(&path, &options.clone().layers(layers.0..layers.1))
        };
        let stage = load(py, arguments, &progress, &note, open, |stage, _| Ok(stage))?;
        let host = Arc::new(Mutex::new(Some(stage.host())));
        Ok(Stage { process: std::process::id(), open: Mutex::new(Some(Open { stage, host })) })
    }

    /// Does what a message asks for. Returns the reply.
    fn handle<'py>(&self, py: Python<'py>, message: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let (host, message) = (self.open()?.host, message.to_vec());
        let handle = move || lock(&host).as_mut().map(|host| host.handle(&message));
        let reply = wait(py, &Cancel::default(), handle)?.ok_or_else(closed)?;
        Ok(PyBytes::new(py, &reply))
    }

    /// The first layer, and the one after the last.
    #[getter]
    fn layers(&self) -> PyResult<(usize, usize)> {
        let span = self.open()?.stage.span();
        Ok((span.first, span.end))
    }

    /// The number of layers of the model.
    #[getter]
    fn model_layers(&self) -> PyResult<usize> {
        Ok(self.open()?.stage.span().all)
    }

    /// How memory is divided.
    #[getter]
    fn plan(&self) -> PyResult<MemoryPlan> {
        Ok(MemoryPlan::of(self.open()?.stage.plan()))
    }

    /// What the expert store has counted.
    fn meters(&self) -> PyResult<ExpertMeters> {
        Ok(ExpertMeters::of(&self.open()?.stage.meters()))
    }

    /// Whether the stage was closed.
    #[getter]
    fn closed(&self) -> bool {
        lock(&self.open).is_none()
    }

    /// Waits for the call in progress, and gives the memory back.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        if self.process != std::process::id() {
            return Ok(());
        }
        let Some(Open { stage, host }) = lock(&self.open).take() else { return Ok(()) };
        wait(py, &Cancel::default(), move || drop((lock(&host).take(), stage)))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // A fork's handles refer to threads that it does not have.
        if self.process != std::process::id() {
            std::mem::forget(lock(&self.open).take());
        }
    }
}

/// The layers of each of so many stages, whose weights take about the same memory.
#[pyfunction]
pub fn split(py: Python<'_>, model: Option<PathBuf>, stages: usize) -> PyResult<Vec<(usize, usize)>> {
    let asked = model.clone();
    let split = move || -> forebay_hub::Result<_> {
        let model = model.map_or_else(forebay_hub::demo, Ok)?;
        let sight = forebay_hub::sight(&model, &Progress::default())?;
        // The weights decide, not this machine's memory.
        let prospect = Prospect::new(&sight.path, &Options::new().memory(u64::MAX))?;
        Ok(prospect.split(stages)?)
    };
    let ranges =
        wait(py, &Cancel::default(), split)?.map_err(|error| hub_exception(error, asked.as_deref()))?;
    Ok(ranges.into_iter().map(|layers| (layers.start, layers.end)).collect())
}

/// A Python object with the methods `call` and `restart`.
///
/// The engine's threads call them, and take the interpreter's lock for that. Nobody who holds that lock waits for these
/// threads.
struct PythonTransport {
    object: Arc<Py<PyAny>>,
    /// An exception that must end the answer: starting the stage again would swallow it.
    fatal: Option<Lost>,
}

/// Transports to the stages that these objects reach.
pub fn transports(objects: &[Arc<Py<PyAny>>]) -> Vec<Box<dyn Transport>> {
    let transport = |object: &Arc<Py<PyAny>>| -> Box<dyn Transport> {
        Box::new(PythonTransport { object: Arc::clone(object), fatal: None })
    };
    objects.iter().map(transport).collect()
}

impl PythonTransport {
    fn with<T>(&mut self, work: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, Lost> {
        Python::try_attach(|py| {
            work(self.object.bind(py)).map_err(|error| {
                let lost = Lost(error.to_string());
                if !error.is_instance_of::<PyException>(py) {
                    self.fatal = Some(lost.clone());
                }
                if error.is_instance_of::<PyKeyboardInterrupt>(py) {
                    // SAFETY: the interpreter runs, and its lock is held. The main thread raises the exception, as
                    // it does after Ctrl-C.
                    unsafe { pyo3::ffi::PyErr_SetInterrupt() };
                }
                lost
            })
        })
        .unwrap_or_else(|| Err(Lost("the Python interpreter ends".into())))
    }
}

impl Transport for PythonTransport {
    fn call(&mut self, message: &[u8]) -> Result<Vec<u8>, Lost> {
        self.with(|object| {
            let reply = object.call_method1("call", (PyBytes::new(object.py(), message),))?;
            Ok(reply.cast::<PyBytes>()?.as_bytes().to_vec())
        })
    }

    fn restart(&mut self) -> Result<(), Lost> {
        match self.fatal.take() {
            Some(lost) => Err(lost),
            None => self.with(|object| object.call_method0("restart").map(drop)),
        }
    }
}

fn closed() -> PyErr {
    failure("the stage is closed: load it again")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
