//! Owns one figure: what the sender costs while its receiver is away. A process of its own, so that nothing else is in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "export/fixture.rs"]
#[allow(dead_code, reason = "the views of the other tests, of which one is used here")]
mod fixture;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use cotenant_export::otlp::{Host, Resource, Sender, Settings, Wishes};
use cotenant_model::view::View;

/// CPU time of this process in clock ticks of 10 ms.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// A node of 20 tenants whose receiver refuses: with a collection every four seconds, fifteen times as often as by default, and
/// the agent's own pauses.
#[test]
fn c112_a_receiver_that_is_away_costs_no_cpu() {
    // Taken and not listening: a connection is refused.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let socket = runtime.block_on(async { tokio::net::TcpSocket::new_v4().unwrap() });
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let wishes = Wishes {
        endpoint: Some(format!("http://{}", socket.local_addr().unwrap())),
        protocol: Some("grpc".to_owned()),
        compression: Some("gzip".to_owned()),
        interval: Some(Duration::from_secs(4)),
        ..Wishes::default()
    };
    let settings = Settings::resolve(&wishes, &|_| None).unwrap();
    let tenants = (0..20).map(|n| fixture::tenant(fixture::pod(&format!("train-{n}")), &[0, 1], n + 1));
    let view = fixture::node(vec![fixture::gpu(0), fixture::gpu(1)], tenants.collect());
    let second = AtomicU32::new(0);
    let source = move || {
        let mut view = View::clone(&view);
        view.taken_unix += f64::from(second.fetch_add(1, Relaxed));
        Some(Arc::new(view))
    };
    let resource = Resource::new(Host::default(), "0.1.0", BTreeMap::new());
    let sender = Sender::start(&settings, resource, Box::new(source)).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let (before, begun) = (ticks(), Instant::now());
    std::thread::sleep(Duration::from_secs(8));
    let share = (ticks() - before) as f64 / 100.0 / begun.elapsed().as_secs_f64();
    let view = &sender.account().view()[0];
    eprintln!(
        "{:.2} % of a CPU; {} points, {} bytes wait; {:?}",
        share * 100.0,
        view.queued,
        view.queued_bytes,
        view.failures
    );
    assert!(view.queued > 0 && view.failures.iter().any(|(reason, n)| *reason == "unreachable" && *n > 2));
    assert!(share < 0.02, "{share}");
    let begun = Instant::now();
    sender.stop();
    assert!(begun.elapsed() < Duration::from_millis(2500));
}
