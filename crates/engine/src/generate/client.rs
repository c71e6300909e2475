//! Who sent a request: which prompts may share computed state, and among whom the server divides its places.

/// Identifies clients whose prompts may share computed state. Another tenant cannot find out what was asked, neither
/// from token counts nor from timing.
///
/// # Examples
/// ```
/// use forebay_engine::Tenant;
///
/// // Chosen by the caller; a server might take a hash of the client's key.
/// assert_ne!(Tenant(1), Tenant::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenant(pub u128);

/// Identifies the sender of a request. Requests without one belong to the same client.
///
/// # Examples
/// ```
/// use forebay_engine::{Client, Request, Tenant};
///
/// # let model = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tales-qwen3moe-Q4_K_M.gguf"));
/// # let engine = forebay_engine::Engine::open(model, &forebay_engine::Options::new().threads(1))?;
/// # let prompt = engine.tokenizer().encode("Once upon a time", Default::default())?;
/// let client = Client { tenant: Tenant(7), number: 1 };
/// let request = Request::new(&engine, prompt)?.client(client);
/// # assert_eq!(request.client, client);
/// # Ok::<(), forebay_engine::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Client {
    /// With whom it shares computed state.
    pub tenant: Tenant,
    /// Identifies the client. Places are divided evenly among clients, however many requests each of them sends.
    pub number: u128,
}
