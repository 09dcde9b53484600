"""The scheduler service: it decides; nothing here touches a tensor."""
