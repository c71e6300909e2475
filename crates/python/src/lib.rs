//! The compiled part of the Python package `forebay`. What users see is in `python/forebay`: most of it is written in Python
//! there, above the classes of this module.
//!
//! The driver's thread computes all answers. A call from Python never computes on its own thread, and releases the
//! interpreter's lock while it waits (`waiting.rs`). Sessions compute on a thread for each call. Only
//! transports (`stages.rs`) take the interpreter's lock on threads of the engine: a messenger (`stream.rs`) wakes event loops.

mod errors;
mod hub;
mod loading;
mod model;
mod openai;
mod progress;
mod requests;
mod server;
mod session;
mod stages;
mod stream;
mod tokenizer;
mod values;
mod waiting;

use pyo3::prelude::*;

/// The compiled part of the package forebay.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::hub::locate;
    #[pymodule_export]
    use crate::model::{Model, plan};
    #[pymodule_export]
    use crate::openai::OpenAi;
    #[pymodule_export]
    use crate::server::{Exchange, Server};
    #[pymodule_export]
    use crate::session::{Logits, Session};
    #[pymodule_export]
    use crate::stages::{Stage, split};
    #[pymodule_export]
    use crate::stream::Stream;
    #[pymodule_export]
    use crate::tokenizer::Tokenizer;
}
