-- Where a group stands, and removal of what all groups handled. KEYS: stream. ARGV: group ("" for none), whether to remove (1).
-- Answer: entries removed, entries left, lowest id that the group has not settled ("" if there is no such group).
local stream = KEYS[1]
if redis.call('EXISTS', stream) == 0 then
  return {0, 0, ''}
end

local low
local own = ''
for _, info in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
  local group = named(info)
  local keep
  if group['pending'] > 0 then
    keep = redis.call('XPENDING', stream, group['name'])[2]
    if less(group['last-delivered-id'], keep) then
      keep = group['last-delivered-id']
    end
  else
    local ms, seq = string.match(group['last-delivered-id'], '^(%d+)-(%d+)$')
    if seq == '18446744073709551615' then
      keep = string.format('%.0f', tonumber(ms) + 1) .. '-0'
    else
      keep = ms .. '-' .. string.format('%.0f', tonumber(seq) + 1)
    end
  end
  if group['name'] == ARGV[1] then
    own = keep
  end
  if not low or less(keep, low) then
    low = keep
  end
end
local removed = 0
if low and ARGV[2] == '1' then
  removed = redis.call('XTRIM', stream, 'MINID', '=', low)
end
return {removed, redis.call('XLEN', stream), own}
