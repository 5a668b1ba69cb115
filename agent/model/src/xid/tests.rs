use super::XidSource::{Kmsg, Nvml, Tracepoint};
use super::*;
use crate::TenantKind;

const SECOND: u64 = 1_000_000_000;
const FIRST: &str = "0000:3b:00";
const SECOND_GPU: &str = "0000:5e:00";

fn id(byte: u8) -> GpuId {
    GpuId::from_uuid([byte; 16])
}

fn pci(text: &str) -> PciAddress {
    PciAddress::parse(text).unwrap()
}

fn gpus() -> BTreeMap<PciAddress, GpuId> {
    BTreeMap::from([(pci(FIRST), id(1)), (pci(SECOND_GPU), id(2))])
}

fn tenant_of(pid: u32) -> Option<Tenant> {
    (pid == 1234).then(|| Tenant::plain(TenantKind::Docker, "train"))
}

fn report(source: XidSource, time_ns: u64, gpu: &str, code: u32) -> XidReport {
    let gpu = if source == Nvml { XidGpu::Id(gpus()[&pci(gpu)].clone()) } else { XidGpu::Pci(pci(gpu)) };
    let message = (source != Nvml).then(|| format!("fault of code {code}"));
    let pid = (source == Kmsg).then_some(1234);
    XidReport { source, time_ns, gpu, code, detail: XidDetail { pid, message, ..XidDetail::default() } }
}

fn observed(reports: impl IntoIterator<Item = XidReport>) -> Xids {
    let mut xids = Xids::default();
    for report in reports {
        xids.observe(report, &gpus(), tenant_of);
    }
    xids
}

/// Code, and the code of its root.
fn family(xids: &Xids) -> Vec<(u32, Option<u32>)> {
    let code = |number| xids.recent().find(|xid| xid.number == number).map(|xid| xid.code);
    xids.recent().map(|xid| (xid.code, xid.echo_of.and_then(code))).collect()
}

#[test]
fn addresses_of_kernel_and_nvml_are_the_same() {
    assert_eq!(pci("0000:3b:00"), pci("00000000:3B:00.0"));
    assert_eq!(pci("0000:3b:00.0").to_string(), "0000:3b:00.0");
    assert_eq!(pci("10002:00:1f").domain, 0x10002);
    for junk in
        ["", "3b:00", "0000:3b", "0000:3b:00:00", "0000:3b:00.", "0000:3b:0", "+000:3b:00", "0000:3b:00.0x"]
    {
        assert_eq!(PciAddress::parse(junk), None, "{junk}");
    }
}

#[test]
fn c105_two_equal_xids_are_two() {
    let xids = observed([
        report(Kmsg, SECOND, FIRST, 31),
        report(Kmsg, SECOND, FIRST, 31),
        report(Kmsg, SECOND + 1, FIRST, 45),
    ]);
    let counts: Vec<_> = xids.counts().map(|(gpu, code, count)| (gpu.cloned(), code, count.count)).collect();
    assert_eq!(counts, [(Some(id(1)), 31, 2), (Some(id(1)), 45, 1)]);
    assert_eq!(xids.counts().last().map(|(_, _, count)| count.last_ns), Some(SECOND + 1));
    assert_eq!(xids.recent().map(|xid| xid.number).collect::<Vec<_>>(), [1, 2, 3]);
}

#[test]
fn three_reports_of_each_of_two_equal_faults_are_two_faults() {
    let mut reports = Vec::new();
    for (source, late) in [(Tracepoint, 0), (Kmsg, 200_000_000), (Nvml, SECOND)] {
        reports
            .extend([report(source, SECOND + late, FIRST, 31), report(source, SECOND + late + 9, FIRST, 31)]);
    }
    let xids = observed(reports);
    let sources: Vec<_> = xids.recent().map(|xid| xid.sources.clone()).collect();
    assert_eq!(sources, [[Kmsg, Tracepoint, Nvml], [Kmsg, Tracepoint, Nvml]]);
    assert_eq!(xids.counts().next().map(|(_, _, count)| count.count), Some(2));
    let first = xids.recent().next().unwrap();
    assert_eq!((first.time_ns, first.gpu.clone(), first.pci), (SECOND, Some(id(1)), Some(pci(FIRST))));
    assert_eq!(first.tenant, tenant_of(1234), "the line had the PID, though it came second");
}

#[test]
fn faults_of_other_gpus_codes_texts_and_times_are_not_joined() {
    let xids = observed([
        report(Kmsg, SECOND, FIRST, 31),
        report(Tracepoint, SECOND, SECOND_GPU, 31),
        report(Tracepoint, SECOND, FIRST, 32),
        report(Nvml, 7 * SECOND, FIRST, 31),
    ]);
    assert_eq!(xids.recent().count(), 4);
    let mut other = report(Tracepoint, SECOND, FIRST, 31);
    other.detail.message = Some("another fault".to_owned());
    assert_eq!(observed([report(Kmsg, SECOND, FIRST, 31), other]).recent().count(), 2);
    let mut longer = report(Kmsg, SECOND, FIRST, 31);
    longer.detail.message = Some("fault of code 31 caused by previous Xid 48".to_owned());
    assert_eq!(observed([report(Tracepoint, SECOND, FIRST, 31), longer]).recent().count(), 1);
}

#[test]
fn c107_what_only_the_kernel_log_has_is_reported() {
    let xids = observed([report(Kmsg, SECOND, FIRST, 79)]);
    let only = xids.recent().next().unwrap();
    assert_eq!((only.sources.as_slice(), only.code, only.echo_of), (&[Kmsg][..], 79, None));
    assert_eq!(xids.counts().count(), 1);
}

#[test]
fn a_gpu_that_nobody_named_keeps_its_place() {
    let mut xids = Xids::default();
    for source in [Kmsg, Tracepoint] {
        xids.observe(report(source, SECOND, FIRST, 79), &BTreeMap::new(), |_| None);
    }
    xids.observe(report(Kmsg, SECOND, FIRST, 45), &BTreeMap::new(), |_| None);
    let only: Vec<_> = xids.recent().map(|xid| (xid.gpu.clone(), xid.pci, xid.sources.len())).collect();
    assert_eq!(only, [(None, Some(pci(FIRST)), 2), (None, Some(pci(FIRST)), 1)]);
    assert_eq!(family(&xids), [(79, None), (45, Some(79))]);
    assert_eq!(xids.counts().map(|(gpu, _, _)| gpu).collect::<Vec<_>>(), [None, None]);
}

#[test]
fn what_follows_a_fault_is_its_echo() {
    let xids = observed([
        report(Kmsg, SECOND, FIRST, 31),
        report(Kmsg, SECOND + 1, FIRST, 43),
        report(Kmsg, SECOND + 2, FIRST, 45),
        report(Kmsg, SECOND + 2, SECOND_GPU, 45),
        report(Kmsg, SECOND + 3, FIRST, 13),
        report(Kmsg, 20 * SECOND, FIRST, 45),
    ]);
    let none = (45, None);
    assert_eq!(family(&xids), [(31, None), (43, Some(31)), (45, Some(31)), none, (13, Some(31)), none]);
}

#[test]
fn equal_faults_and_other_faults_are_roots() {
    let codes = [13, 13, 31, 31, 74];
    let xids = observed(codes.iter().zip(1..).map(|(code, at)| report(Kmsg, at, FIRST, *code)));
    assert_eq!(family(&xids), codes.map(|code| (code, None)));
}

#[test]
fn an_echo_that_comes_first_finds_its_root() {
    let xids = observed([report(Nvml, SECOND + 5, FIRST, 45), report(Kmsg, SECOND, FIRST, 31)]);
    assert_eq!(family(&xids), [(45, Some(31)), (31, None)]);
}

#[test]
fn the_drivers_own_word_on_the_cause_wins() {
    let mut echo = report(Kmsg, SECOND + 2, FIRST, 45);
    echo.detail.caused_by = Some(13);
    let xids = observed([report(Kmsg, SECOND, FIRST, 13), report(Kmsg, SECOND + 1, FIRST, 74), echo.clone()]);
    assert_eq!(family(&xids), [(13, None), (74, None), (45, Some(13))]);
    echo.detail.caused_by = Some(99);
    assert_eq!(family(&observed([report(Kmsg, SECOND, FIRST, 13), echo])), [(13, None), (45, None)]);
}

#[test]
fn a_storm_is_bounded_and_its_echoes_keep_their_root() {
    let storm = 3 * Xids::MOST as u64;
    let reports = std::iter::once(report(Kmsg, 0, FIRST, 31));
    let xids = observed(
        reports.chain((1..storm).map(|at| report(Kmsg, at, FIRST, if at % 2 == 0 { 43 } else { 45 }))),
    );
    assert_eq!(xids.recent().count(), Xids::MOST);
    assert_eq!(xids.counts().map(|(_, _, count)| count.count).sum::<u64>(), storm);
    let roots: Vec<u32> = xids.recent().filter(|xid| xid.echo_of.is_none()).map(|xid| xid.code).collect();
    assert_eq!(roots, [31]);
    // Roots past the list: the last are kept, and what they leave behind stays an echo.
    let mut reports = vec![report(Kmsg, 0, FIRST, 74), report(Kmsg, 1, FIRST, 45)];
    reports.extend((2..=Xids::MOST as u64).map(|at| report(Kmsg, at, FIRST, 31)));
    let xids = observed(reports);
    assert_eq!((xids.recent().count(), xids.recent().all(|xid| xid.echo_of.is_none())), (Xids::MOST, true));
    let codes = u32::try_from(Xids::MOST_COUNTS).unwrap() + 10;
    let xids = observed((0..codes).map(|code| report(Kmsg, 0, FIRST, 1000 + code)));
    assert_eq!((xids.counts().count(), xids.uncounted()), (Xids::MOST_COUNTS, 10));
}
