//! Who asks: what requests may share, and among whom places are divided.

/// Those whose prompts may share what was computed of them. Nobody of another tenant can find out, by counts of tokens or by
/// time, what was asked.
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

/// Who asks. Requests that do not say are one client's.
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
    /// Whom it shares with.
    pub tenant: Tenant,
    /// Tells clients apart: places are divided among them, however many requests each of them has.
    pub number: u128,
}
