"""The wire: one file per link, and for each direction the union that its receiver decodes."""

from shared.messages import common, gateway, pages, storage, worker

ToWorker = (
    common.Welcome
    | common.Refused
    | common.HelloWanted
    | common.Heartbeat
    | common.Missed
    | common.Fence
    | common.Cancel
    | worker.MapSegment
    | worker.DropSegment
    | worker.RunStep
    | worker.WritePages
    | worker.LoadPages
)
ToStorage = (
    common.Welcome
    | common.Refused
    | common.HelloWanted
    | common.Heartbeat
    | common.Missed
    | common.Fence
    | common.Cancel
    | storage.OpenSegment
    | storage.CommitPages
    | storage.ReleasePages
    | storage.ListPages
    | storage.AdoptPages
    | storage.FindPages
    | storage.PrefetchPages
    | storage.ArchivePages
    | storage.ChangeBackend
)
ToGateway = (
    common.Welcome
    | common.Refused
    | common.HelloWanted
    | common.Heartbeat
    | common.Missed
    | gateway.EmitTokens
    | gateway.Finish
    | gateway.Reject
    | gateway.Status
    | gateway.Why
    | gateway.Recorded
    | gateway.Administered
)
FromWorker = (
    worker.WorkerHello
    | common.Heartbeat
    | common.Missed
    | common.Fenced
    | common.Cancelled
    | common.OperationFailed
    | worker.SegmentMapped
    | worker.SegmentDropped
    | worker.StepDone
    | worker.StepFailed
    | worker.WriteDone
    | worker.LoadDone
)
FromStorage = (
    storage.StorageHello
    | common.Heartbeat
    | common.Missed
    | common.Fenced
    | common.Cancelled
    | common.OperationFailed
    | storage.SegmentOpened
    | storage.PeerExited
    | storage.Committed
    | storage.Released
    | storage.Inventory
    | storage.Adopted
    | storage.PagesDropped
    | storage.Superseded
    | storage.Found
    | storage.PrefetchProgress
    | storage.PrefetchDone
    | storage.ArchiveDone
    | storage.BackendChanged
)
FromGateway = (
    gateway.GatewayHello
    | common.Heartbeat
    | common.Missed
    | gateway.Submit
    | gateway.Abort
    | gateway.StatusWanted
    | gateway.WhyWanted
    | gateway.RecordWanted
    | gateway.Administer
)
ToScheduler = FromWorker | FromStorage | FromGateway
ToPageServer = (
    pages.Join
    | pages.Alive
    | pages.Leave
    | pages.PutPages
    | pages.PutPage
    | pages.GetPages
    | pages.MorePages
    | pages.Stop
)
ToPageClient = pages.Joined | pages.NotJoined | pages.PutProgress | pages.GotPage | pages.Stopped | pages.RequestFailed
