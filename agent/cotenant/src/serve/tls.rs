//! Owns what TLS the endpoint speaks, and which client certificates it takes.
//! Refuses defaults of its own beside rustls's: the web configuration narrows, never widens.

use std::{borrow::Cow, path::Path, sync::Arc};

use anyhow::{Context, Result, bail};
use rustls::{
    RootCertStore, ServerConfig, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring::default_provider},
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
    version::{TLS12, TLS13},
};
use tokio_rustls::TlsAcceptor;

use super::web::{ClientAuth, TlsServer, Version, text};

/// A way in, and the names of which a client's certificate must have one.
pub(super) struct Tls {
    pub(super) acceptor: TlsAcceptor,
    allowed: Vec<String>,
    verifies: bool,
}

impl Tls {
    /// Files are read here, relative to `directory`.
    pub(super) fn new(tls: &TlsServer, directory: &Path) -> Result<Self> {
        let provider = Arc::new(provider(tls)?);
        let versions: Vec<&'static SupportedProtocolVersion> =
            [(Version::Tls12, &TLS12), (Version::Tls13, &TLS13)]
                .into_iter()
                .filter(|(version, _)| {
                    tls.min_version.is_none_or(|min| *version >= min)
                        && tls.max_version.is_none_or(|max| *version <= max)
                })
                .map(|(_, supported)| supported)
                .collect();
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&versions)
            .context("tls_server_config: cipher_suites leave nothing to speak")?;
        let builder = match tls.client_auth()? {
            ClientAuth::None => builder.with_no_client_auth(),
            wanted => {
                let mut roots = RootCertStore::empty();
                for authority in
                    certificates(tls.client_ca.as_deref(), tls.client_ca_file.as_deref(), directory)?
                {
                    roots
                        .add(authority)
                        .context("tls_server_config: client_ca has a certificate that cannot be used")?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(roots.into(), provider);
                let verifier =
                    if wanted == ClientAuth::Optional { verifier.allow_unauthenticated() } else { verifier };
                builder.with_client_cert_verifier(verifier.build().context("tls_server_config: client_ca")?)
            }
        };
        let chain = certificates(tls.cert.as_deref(), tls.cert_file.as_deref(), directory)?;
        let (key, place) = pem(tls.key.as_deref(), tls.key_file.as_deref(), directory)?;
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes())
            .with_context(|| format!("tls_server_config: {place} has no private key in PEM"))?;
        let mut config = builder
            .with_single_cert(chain, key)
            .context("tls_server_config: certificate and key do not belong together")?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self {
            acceptor: TlsAcceptor::from(Arc::new(config)),
            allowed: tls.client_allowed_sans.clone(),
            verifies: tls.client_auth()? == ClientAuth::Required,
        })
    }

    /// Whether nobody gets in without a certificate.
    pub(super) const fn verifies(&self) -> bool {
        self.verifies
    }

    /// Whether a client whose certificate was verified is one of those that are let in.
    pub(super) fn admits(&self, certificates: Option<&[CertificateDer<'_>]>) -> bool {
        if self.allowed.is_empty() {
            return true;
        }
        let Some(certificate) = certificates.and_then(<[_]>::first) else { return false };
        let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else { return false };
        self.allowed.iter().any(|name| match ServerName::try_from(name.as_str()) {
            Ok(ServerName::IpAddress(address)) => {
                certificate.verify_is_valid_for_subject_name(&ServerName::IpAddress(address)).is_ok()
            }
            // The name itself: a wildcard in a certificate is not everybody it could stand for.
            _ => certificate.valid_dns_names().any(|of| of == name),
        })
    }
}

fn provider(tls: &TlsServer) -> Result<CryptoProvider> {
    let mut provider = default_provider();
    if !tls.cipher_suites.is_empty() {
        // TLS 1.3's are not chosen by this key, as in Go.
        let named = |suite: &rustls::SupportedCipherSuite| format!("{:?}", suite.suite());
        let known: Vec<String> = provider.cipher_suites.iter().map(&named).collect();
        if let Some(unknown) = tls.cipher_suites.iter().find(|name| !known.contains(name)) {
            bail!("tls_server_config: cipher_suites: {unknown:?} is none of {}", known.join(", "));
        }
        provider
            .cipher_suites
            .retain(|suite| suite.version() == &TLS13 || tls.cipher_suites.contains(&named(suite)));
        let place = |suite: &rustls::SupportedCipherSuite| {
            tls.cipher_suites.iter().position(|name| *name == named(suite)).unwrap_or(0)
        };
        provider.cipher_suites.sort_by_key(place);
    }
    if !tls.curve_preferences.is_empty() {
        let all = std::mem::take(&mut provider.kx_groups);
        for curve in &tls.curve_preferences {
            let name = match curve.as_str() {
                "X25519" => rustls::NamedGroup::X25519,
                "CurveP256" => rustls::NamedGroup::secp256r1,
                "CurveP384" => rustls::NamedGroup::secp384r1,
                other => bail!(
                    "tls_server_config: curve_preferences: {other:?} is none of X25519, CurveP256, CurveP384"
                ),
            };
            provider.kx_groups.extend(all.iter().find(|group| group.name() == name));
        }
    }
    Ok(provider)
}

/// PEM text and where it is from.
fn pem<'a>(inline: Option<&'a str>, file: Option<&Path>, directory: &Path) -> Result<(Cow<'a, str>, String)> {
    match (inline, file) {
        (Some(inline), _) => Ok((inline.into(), "the inline text".to_owned())),
        (None, Some(file)) => {
            let path = directory.join(file);
            Ok((text(&path)?.into(), path.display().to_string()))
        }
        (None, None) => bail!("tls_server_config: a certificate or key is missing"),
    }
}

fn certificates(
    inline: Option<&str>,
    file: Option<&Path>,
    directory: &Path,
) -> Result<Vec<CertificateDer<'static>>> {
    let (text, place) = pem(inline, file, directory)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(text.as_bytes())
        .collect::<Result<_, _>>()
        .with_context(|| format!("tls_server_config: {place} is not PEM"))?;
    if found.is_empty() {
        bail!("tls_server_config: {place} has no certificate");
    }
    Ok(found)
}
