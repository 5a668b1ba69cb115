//! Owns what is demanded of OTLP, against a receiver that speaks it.
//! Refuses a network of its own: everything is on the loopback, and the outages are real refusals.

mod content;
mod real;
mod sink;
mod stories;
mod tls;
mod trouble;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cotenant_export::otlp::{Account, Host, Pauses, Resource, Sender, Settings, Wishes};
use cotenant_model::view::View;

use crate::fixture;

/// A view that a test can move on.
#[derive(Clone)]
struct Node(Arc<Mutex<Arc<View>>>);

impl Node {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Arc::new(fixture::view()))))
    }

    fn change(&self, change: impl FnOnce(&mut View)) {
        let mut held = self.0.lock().unwrap();
        let mut view = View::clone(&held);
        view.taken_unix += 1.0;
        change(&mut view);
        *held = Arc::new(view);
    }

    /// As time goes by: everything else stays.
    fn pass(&self) {
        self.change(|_| ());
    }

    fn start(&self, settings: &Settings) -> Sender {
        let node = self.clone();
        let source = Box::new(move || Some(Arc::clone(&node.0.lock().unwrap())));
        Sender::start(settings, resource(), source).unwrap()
    }
}

fn resource() -> Resource {
    let host = Host {
        name: Some("gpu-07".to_owned()),
        id: Some("4c4c4544".to_owned()),
        node: Some("gpu-07.cluster".to_owned()),
    };
    Resource::new(host, "0.1.0", std::collections::BTreeMap::new())
}

fn settings(protocol: &str, address: SocketAddr, wishes: Wishes) -> Settings {
    let wishes = Wishes {
        endpoint: wishes.endpoint.or_else(|| Some(format!("http://{address}"))),
        protocol: Some(protocol.to_owned()),
        interval: wishes.interval.or(Some(Duration::from_millis(50))),
        ..wishes
    };
    let settings = Settings::resolve(&wishes, &|_| None).unwrap();
    let pauses = Pauses { first: Duration::from_millis(20), most: Duration::from_millis(200) };
    Settings { pauses, linger: Duration::from_millis(20), ..settings }
}

/// Waits for what must come; a test that gets past this has seen it.
async fn until(what: &str, come: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !come() {
        assert!(Instant::now() < deadline, "{what} did not come");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The stop blocks, so it is kept off the receiver's thread.
async fn stop(sender: Sender) {
    tokio::task::spawn_blocking(move || sender.stop()).await.unwrap();
}

fn dropped(account: &Account, signal: &str, reason: &str) -> u64 {
    let view = account.view().into_iter().find(|view| view.signal == signal).unwrap();
    view.dropped.into_iter().find(|(known, _)| *known == reason).unwrap().1
}

fn failures(account: &Account, signal: &str, reason: &str) -> u64 {
    let view = account.view().into_iter().find(|view| view.signal == signal).unwrap();
    view.failures.into_iter().find(|(known, _)| *known == reason).unwrap().1
}

fn exported(account: &Account, signal: &str) -> u64 {
    account.view().into_iter().find(|view| view.signal == signal).unwrap().exported
}
